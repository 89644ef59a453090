"""exp(x), in two forms: for the rows of a softmax (x ≤ 0), by as few squares as their spread needs, and for any x.

A softmax subtracts the maximum first, so every row has an entry 0 and all are ≤ 0. `Exponential` is a chain of
squares (`squares.py`) fitted to exp on [-reach, 0] such that the softmax of any row of up to 1024 entries errs
least: relatively near 0, and far below 1/1024 of that in the tail, of which a row may hold many entries. Below -reach
the chain is wrong, by any amount: where that may be asked for, one comparison puts an exact 0 there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from aero_compile.errors import InputError
from aero_compile.runtime.arithmetic.coefficients import EXPONENTIALS
from aero_compile.runtime.arithmetic.comparison import COMPARISON_BYTES, SELECT_BYTES, below
from aero_compile.runtime.arithmetic.one_product import OneProduct
from aero_compile.runtime.arithmetic.squares import SQUARE_BYTES, Squares, square
from aero_compile.runtime.arithmetic.tolerances import DEFAULT

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
