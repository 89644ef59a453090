"""Sums of squares: what each party computes alone, and the one product that is left.

The parties hold rows X in shares X_0 + X_1 modulo 2^64. For each row x

    Σ x² = Σ x_0² + Σ x_1² + 2·Σ x_0·x_1  modulo 2^64,

and each party knows one of the first two sums. The last is a product of what one party knows with what the other knows:
the diagonal of X_0·X_1ᵀ for all rows at once. With f fraction bits in x all terms have 2f, so that nothing is rounded
before they are added. A result is a party's own share or a function of it, so it tells nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from aero_compile.runtime.kernels.kernel import LocalKernel, Result, Shape
from aero_compile.runtime.kernels.words import Words
from aero_compile.runtime.roles import CLIENT, SERVER


@dataclass(frozen=True)
class SquareTerms(LocalKernel):
    """The kernel: rows [R, w] become X_0 and X_1 [R, w], and shares of Σ x_0² + Σ x_1² [R] as numbers of 2f bits.

    X_0 is given as whole numbers, because SPU truncates a product of two fixed-point numbers, and that must wait until
    the terms are added. `width`: w; `fraction_bits`: f.
    """

    width: int
    fraction_bits: int

    def check(self) -> None:
        if type(self.width) is not int or self.width < 1:
            raise ValueError(f"SquareTerms takes rows of 1 number or more, not of {self.width!r}")
        if type(self.fraction_bits) is not int or not 1 <= self.fraction_bits <= 28:
            raise ValueError(f"SquareTerms takes 1 to 28 fraction bits, not {self.fraction_bits!r}")

    def results(self, *shapes: Shape) -> tuple[Result, ...]:
        if len(shapes) != 1 or len(shapes[0]) != 2 or shapes[0][1] != self.width:
            raise ValueError(f"SquareTerms takes rows [R, {self.width}], not {shapes}")
        return Result(shapes[0], "int32", SERVER), Result(shapes[0], owner=CLIENT), Result(shapes[0][:1])

    def of_share(self, rank: int, share: Words) -> tuple[Words, ...]:
        """What party `rank` holds of each result."""
        rows = share.reshape((-1, self.width))
        sums, none = (rows * rows).sum(axis=1, dtype=np.uint64), np.zeros_like(share)
        return (share, none, sums) if rank == SERVER else (none, share, sums)

    def plain(self, *arguments: Any) -> tuple[Any, ...]:
        """The results as JAX arrays of floats would show them: no terms but the sums."""
        import jax.numpy as jnp

        (x,) = arguments
        none = jnp.zeros_like(x)
        return none.astype(np.int32), none, (x * x).sum(axis=1) * 2.0**self.fraction_bits
