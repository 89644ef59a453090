"""Fixed-point numbers as whole ones: the same words, so that their products are not truncated one by one.

SPU truncates a product of two fixed-point numbers at once, in an exchange of its own: a batch of matrix products so
many times, one after the other. A whole number times a fixed-point number it leaves alone. So one factor is called
whole, and what comes out, with twice the fraction bits, is truncated once for the whole batch. Each party hands on its
own share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from aero_compile.runtime.kernels.kernel import LocalKernel, Result, Shape
from aero_compile.runtime.kernels.words import Words


@dataclass(frozen=True)
class WholeNumbers(LocalKernel):
    """The kernel: numbers x of `fraction_bits` f as shares of the whole numbers x·2^f."""

    fraction_bits: int

    def check(self) -> None:
        if type(self.fraction_bits) is not int or not 1 <= self.fraction_bits <= 28:
            raise ValueError(f"WholeNumbers takes 1 to 28 fraction bits, not {self.fraction_bits!r}")

    def results(self, *shapes: Shape) -> tuple[Result, ...]:
        if len(shapes) != 1:
            raise ValueError(f"WholeNumbers takes one argument, not {len(shapes)}")
        return (Result(shapes[0], "int32"),)

    def of_share(self, rank: int, share: Words) -> tuple[Words, ...]:
        """What party `rank` holds of the result: its share."""
        return (share,)

    def plain(self, *arguments: Any) -> tuple[Any, ...]:
        """x·2^f as JAX's 32-bit integers, for |x| < 2^(31 - f)."""
        import jax.numpy as jnp

        (x,) = arguments
        return (jnp.rint(x * 2.0**self.fraction_bits).astype(np.int32),)
