"""exp(x): for the rows of a softmax (x ≤ 0) by a chain of squares or by one product, and for any x.

A softmax subtracts the maximum first, so every row has an entry 0 and all are ≤ 0. `Exponential` is a chain of
squares (`squares.py`), as few as the spread of the rows needs, fitted to exp on [-reach, 0] such that the softmax of
any row of up to 1024 entries errs least: relatively near 0, and far below 1/1024 of that in the tail, of which a row
may hold many entries. Below -reach the chain is wrong, by any amount: where that may be asked for, one comparison puts
an exact 0 there.

`OneProduct` multiplies two numbers that one party each knows. What the parties do with their shares, and why it is
right, is explained in `kernels/local_kernels.py`. Here are the product and the scaling around it: of the 60 bits of the
product SPU truncates 18, and two more products with a power of two leave the 18 of the format; on shares it is
truncated twice by 21. Factors fill whole ciphertexts; the few that are left take stored triples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from aero_compile.errors import InputError
from aero_compile.runtime.arithmetic.ciphertext_packing import by_parts, owned_parts
from aero_compile.runtime.arithmetic.coefficients import EXPONENTIALS
from aero_compile.runtime.arithmetic.comparison import COMPARISON_BYTES, SELECT_BYTES, below
from aero_compile.runtime.arithmetic.ring import in_two_phases, truncated
from aero_compile.runtime.arithmetic.squares import SQUARE_BYTES, Squares, square
from aero_compile.runtime.arithmetic.two_phases import product_of_owned
from aero_compile.runtime.kernels.kernel import call_kernel
from aero_compile.runtime.kernels.local_kernels import FRACTION_BITS as FRACTION_BITS
from aero_compile.runtime.kernels.local_kernels import TOP, ExponentialFactors
from aero_compile.runtime.tolerances import DEFAULT

RING_BITS = 64
"""Of the ring in which the kernel works; the fraction bits are its `FRACTION_BITS`."""

PRODUCT_BYTES = 152
"""Bytes an element in Cheetah, both ways: a product with a value of one party (143), three truncations."""

ROOM = 0.02
"""By so much less than the kernel's reach x may be below 0: what a score less its row's maximum loses by rounding."""


@dataclass(frozen=True)
class OneProduct:
    """The exponential of a softmax for scores less their row's maximum, from one product.

    `bits`, `mantissa`: of the kernel. `clamped`: one comparison gives exact zeros below -`reach`, so that any score may
    come; else rows must not spread further. `short`, `long`: the largest error of a weight of a softmax in rows of up
    to 128 and up to 1024 entries, in Cheetah with 64-bit rings and 18 fraction bits, measured and rounded up.
    """

    bits: int
    mantissa: int
    clamped: bool
    short: float
    long: float

    @property
    def reach(self) -> float:
        """The product holds on [-reach, 0]."""
        return self._kernel(True).reach - ROOM

    @property
    def widest(self) -> float:
        """Largest difference of two scores of a row for which this holds."""
        return math.inf if self.clamped else self.reach

    @property
    def bytes_per_element(self) -> int:
        """Bytes in Cheetah, both ways (64-bit ring, 18 fraction bits)."""
        return PRODUCT_BYTES + self.clamped * (COMPARISON_BYTES + SELECT_BYTES)

    @property
    def form(self) -> str:
        """In words."""
        return f"one product, k = {self.bits}, m = {self.mantissa}"

    def error_in(self, entries: int) -> float:
        """The error in rows of up to `entries`; beyond 1024 it is taken to grow in proportion."""
        return self.short if entries <= 128 else self.long * max(1.0, entries / 1024)

    def __call__(self, x: Any) -> Any:
        """Evaluate on a JAX array of scores less their row's maximum."""
        import jax.numpy as jnp

        parts = [x.size, 0] if in_two_phases() else owned_parts(x.size)
        value = by_parts([x], parts, [self._owned] * (len(parts) - 1) + [self._shared])
        return jnp.where(below(x, -self.reach, coarse=True), 0.0, value) if self.clamped else value

    def _kernel(self, owned: bool) -> ExponentialFactors:
        return ExponentialFactors(self.bits, self.mantissa, owned)

    def _owned(self, x: Any) -> Any:
        return _product(x, self._kernel(True))

    def _shared(self, x: Any) -> Any:
        return _product(x, self._kernel(False))


def _product(x: Any, kernel: ExponentialFactors) -> Any:
    unit = 2.0 ** (kernel.bits - FRACTION_BITS)
    mine, theirs = call_kernel(kernel, x * np.float32(unit / kernel.log_base) + np.float32(unit * kernel.offset))
    if in_two_phases():
        half = (TOP - FRACTION_BITS) // 2
        return truncated(product_of_owned(mine, theirs, half), half)
    # In two products, since a number that is multiplied with less leaves too little room; half a unit of the result is
    # added between them, which Cheetah loses by rounding down and which keeps the compiler from joining the two.
    product = mine * theirs
    root = np.float32(2.0 ** -((TOP - 2 * FRACTION_BITS) // 2))
    return (product * root + np.float32(2.0 ** -(FRACTION_BITS + 1)) / root) * root


EXP_ITERATIONS = 1
"""Squarings in SPU's own exp: one makes it the square that `squares.square` asks for."""


@dataclass(frozen=True)
class Power:
    """exp(x) as (1 + z + z²/2)^n with z = x/n, for x between `lowest` (towards -2n it returns to 1) and `highest`.

    `error`: the largest for x ≤ 0 in Cheetah (64-bit ring, 18 fraction bits), measured and rounded up. Each squaring
    doubles the rounding of the one before, so fewer of them are closer, on a shorter interval. For x > 0 the error is
    relative, and x³/6n² besides.
    """

    n: int
    lowest: float
    error: float

    @property
    def highest(self) -> float:
        """Largest x for which x³/6n² stays below `error`: the result errs by no more than twice that, relatively."""
        return float((6 * self.n**2 * self.error) ** (1 / 3))

    @property
    def squarings(self) -> int:
        """Squarings of the bracket."""
        return self.n.bit_length() - 1

    @property
    def bytes_per_element(self) -> int:
        """Bytes in Cheetah, both ways (64-bit ring, 18 fraction bits)."""
        return (self.squarings + 1) * SQUARE_BYTES + 5

    def __call__(self, x: Any) -> Any:
        """Evaluate on a JAX array; the bracket is half of (z + 1)² + 1, computed from 8(z + 1): three more bits."""
        value = (square(x * (8.0 / self.n) + 8.0) + 64.0) * (1.0 / 128.0)
        for _ in range(self.squarings):
            value = square(value)
        return value


POWERS = (Power(128, -230.4, 2e-3), Power(64, -115.2, 7e-4), Power(32, -51.2, 4e-4))
"""Widest first."""


@dataclass(frozen=True)
class Exponential:
    """How the exponential of a softmax is computed, for scores less their row's maximum.

    `squares`: length of the chain. `reach`: it holds on [-reach, 0.01]. `clamped`: one comparison gives exact
    zeros below that, so that any score may come; else rows must not spread further than `reach`.
    """

    squares: int
    reach: float
    clamped: bool

    @property
    def widest(self) -> float:
        """Largest difference of two scores of a row for which this holds."""
        return math.inf if self.clamped else self.reach

    @property
    def bytes_per_element(self) -> int:
        """Bytes in Cheetah, both ways (64-bit ring, 18 fraction bits)."""
        return self.chain.bytes_per_element + self.clamped * (COMPARISON_BYTES + SELECT_BYTES)

    @property
    def chain(self) -> Squares:
        """The chain of squares."""
        return EXPONENTIALS[self.squares, self.reach]

    @property
    def error(self) -> float:
        """Largest error of a weight of a softmax with rows of up to 1024 entries, in Cheetah (as above)."""
        return ERRORS[self][1]

    @property
    def form(self) -> str:
        """In words."""
        return f"chain of {self.squares} squares"

    def error_in(self, entries: int) -> float:
        """The same for rows of up to `entries`; beyond 1024 it is taken to grow in proportion."""
        short, long = ERRORS[self]
        return short if entries <= 128 else long * max(1.0, entries / 1024)

    def __call__(self, x: Any) -> Any:
        """Evaluate on a JAX array of scores less their row's maximum."""
        import jax.numpy as jnp

        value = self.chain(x)
        return jnp.where(below(x, -self.reach, coarse=True), 0.0, value) if self.clamped else value


SAFE = Exponential(5, 16.0, clamped=True)
"""For scores of which nothing is known."""

ERRORS = {
    Exponential(3, 4.0, clamped=False): (6e-4, 6e-4),
    Exponential(4, 8.0, clamped=False): (4e-4, 5e-4),
    Exponential(4, 12.5, clamped=False): (8e-4, 6e-3),
    Exponential(4, 12.5, clamped=True): (8e-4, 6e-3),
    Exponential(5, 16.0, clamped=False): (4e-4, 5e-4),
    SAFE: (4e-4, 5e-4),
    Exponential(5, 32.0, clamped=False): (8e-4, 9e-4),
    Exponential(6, 64.0, clamped=False): (6e-4, 3e-3),
}
"""Of a weight of a softmax, in rows of up to 128 and up to 1024 entries, measured in Cheetah and rounded up."""


ONE_PRODUCT = (
    OneProduct(18, 12, False, 1e-4, 1.2e-4),
    OneProduct(18, 12, True, 6e-4, 5e-3),
    OneProduct(17, 11, False, 1.6e-4, 1.6e-4),
    OneProduct(17, 11, True, 2e-4, 6e-4),
    OneProduct(17, 10, False, 3e-4, 3e-4),
    OneProduct(17, 10, True, 3e-4, 3.5e-4),
)
"""Exponentials of one product, in the 64-bit ring with 18 fraction bits alone."""

SoftmaxExponential = Exponential | OneProduct

SOFTMAX_ERROR = 1e-3
"""How much a weight of a softmax may be off where nothing else is asked for."""


def choose_exponential(
    spread: float = math.inf, tolerance: float = SOFTMAX_ERROR, entries: int = 1024, one_product: bool = True
) -> SoftmaxExponential:
    """Return the cheapest exponential for rows of up to `entries` scores that differ by `spread` at most.

    `one_product`: also consider those of one product, which need the 64-bit ring with 18 fraction bits.

    Raises:
        InputError: none errs by `tolerance` or less.
    """
    forms: list[SoftmaxExponential] = [*ERRORS, *(ONE_PRODUCT if one_product else ())]
    wide = [each for each in forms if each.widest >= spread]
    good = [each for each in wide if each.error_in(entries) <= tolerance]
    if not good:
        least = min(each.error_in(entries) for each in wide)
        raise InputError(
            f"no exponential errs by {tolerance:g} or less in a softmax of {entries} entries: {least:g} is the least"
        )
    return min(good, key=lambda each: (each.bytes_per_element, each.error_in(entries)))


def cheapest_exponential(
    spread: float = math.inf, tolerance: float | None = None, entries: int = 1024, one_product: bool = True
) -> SoftmaxExponential:
    """As `choose_exponential`; without a tolerance its own, or `SAFE` where rows are too long for that."""
    if tolerance is not None:
        return choose_exponential(spread, tolerance, entries, one_product)
    try:
        return choose_exponential(spread, entries=entries, one_product=one_product)
    except InputError:
        return SAFE


def choose_power(tolerance: float = DEFAULT.exp) -> Power:
    """Return the form of the general exponential that holds widest among those that err by `tolerance` at most.

    Raises:
        InputError: there is none.
    """
    for power in POWERS:
        if power.error <= tolerance:
            return power
    raise InputError(f"no exp errs by {tolerance:g} or less: {min(each.error for each in POWERS):g} is the least")
