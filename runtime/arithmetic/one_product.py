"""exp(x) for the rows of a softmax by one product of two numbers that one party each knows.

What the parties do with their shares, and why it is right, is told in `kernels/exponential_factors.py`. Here are the
product and the scaling around it: of the 60 bits of the product SPU truncates 18, and two more products with a power of
two leave the 18 of the format; on shares it is truncated twice by 21. Factors fill whole ciphertexts; the few that are
left take stored triples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from aero_compile.runtime.arithmetic.comparison import COMPARISON_BYTES, SELECT_BYTES, below
from aero_compile.runtime.arithmetic.filling import by_parts, owned_parts
from aero_compile.runtime.arithmetic.ring import in_two_phases
from aero_compile.runtime.arithmetic.truncation import truncated
from aero_compile.runtime.arithmetic.two_phases import product_of_owned
from aero_compile.runtime.kernels.calls import call_kernel
from aero_compile.runtime.kernels.exponential_factors import FRACTION_BITS as FRACTION_BITS
from aero_compile.runtime.kernels.exponential_factors import TOP, ExponentialFactors

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
