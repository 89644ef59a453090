"""Kernels without a message: factors of an exponential, terms of sums of squares, fixed-point numbers as whole ones.

A result is a party's own share or a function of it, so it reveals nothing.

`ExponentialFactors`: exp(s) as one product of two numbers, each of which one party computes from its own share. Let k
be a number of bits and g = 2^k - 1. g is odd and has the order 2^(64 - k) modulo 2^64, which is the modulus that is
left for the integer part of a ring element with k fraction bits. The parties hold y = s/ln g + c in shares y_0 + y_1
modulo 2^64. Party i cuts its own into an integer n_i and a fraction f_i of 1, and computes

    a_i = g^(n_i) · round(g^(f_i) · 2^m)  modulo 2^64.

Then a_0 · a_1 = g^y · 2^(2m) modulo 2^64 up to the two roundings: what the sum of the shares loses above 2^64 is a
multiple of the order of g, and what the fractions carry into the integer part, one of them has as a factor g. As long
as 1 ≤ y, no power of g is negative, and as long as y ≤ c = (60 - 2m)/k the product stays below 2^60: it is e^s · 2^60,
without a comparison and without a chance of failure. s may lie in [-(c - 1) ln g, 0]; elsewhere the result is any
number.

`SquareTerms`: what each party computes alone of a sum of squares, and the one product that is left. The parties hold
rows X in shares X_0 + X_1 modulo 2^64. For each row x

    Σ x² = Σ x_0² + Σ x_1² + 2·Σ x_0·x_1  modulo 2^64,

and each party knows one of the first two sums. The last is a product of what one party knows with what the other knows:
the diagonal of X_0·X_1ᵀ for all rows at once. With f fraction bits in x all terms have 2f, so that nothing is rounded
before they are added.

`WholeNumbers`: fixed-point numbers as whole ones, the same words, so that their products are not truncated one by one.
SPU truncates a product of two fixed-point numbers at once, in an exchange of its own: a batch of matrix products so
many times, one after the other. A whole number times a fixed-point number it leaves alone. So one factor is called
whole, and the result, with twice the fraction bits, is truncated once for the whole batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from aero_compile.runtime.kernels.kernel import LocalKernel, Result, Shape
from aero_compile.runtime.kernels.share_words import Words
from aero_compile.runtime.roles import CLIENT, SERVER

TOP = 60
"""The product of the factors of s = 0 is 2^TOP: SPU truncates numbers below 2^62."""

FRACTION_BITS = 18
"""Of the format of the argument, and of the results: the product of both holds exp(s) · 2^TOP / 2^(2 · 18)."""

WINDOW = 12
"""Bits of an exponent that one table of powers takes."""


@dataclass(frozen=True)
class ExponentialFactors(LocalKernel):
    """The kernel: y, as ring elements with `bits` fraction bits, becomes the factors of exp(s) · 2^60.

    `mantissa`: m above. `owned`: the client's factor is given as a value that it owns, so that a product takes one
    way; else as a share, for the few products that take stored triples.
    """

    bits: int
    mantissa: int
    owned: bool = True

    def check(self) -> None:
        numbers = (self.bits, self.mantissa)
        if not all(type(each) is int for each in numbers) or type(self.owned) is not bool:
            raise ValueError("the options of ExponentialFactors are two whole numbers and a bool")
        if not 12 <= self.bits <= 20 or not 1 <= self.mantissa <= 16 or self.offset <= 1:
            raise ValueError(f"ExponentialFactors takes 12 to 20 bits and a mantissa of 1 to 16, not {numbers}")

    @property
    def log_base(self) -> float:
        """ln g: so many nats are 1 in y."""
        return math.log(2**self.bits - 1)

    @property
    def offset(self) -> float:
        """c, which is y for s = 0."""
        return (TOP - 2 * self.mantissa) / self.bits

    @property
    def reach(self) -> float:
        """The result holds for s in [-reach, 0]."""
        return (self.offset - 1) * self.log_base

    def results(self, *shapes: Shape) -> tuple[Result, ...]:
        if len(shapes) != 1:
            raise ValueError(f"ExponentialFactors takes one argument, not {len(shapes)}")
        return Result(shapes[0]), Result(shapes[0], owner=CLIENT if self.owned else None)

    def of_share(self, rank: int, share: Words) -> tuple[Words, Words]:
        """What party `rank` holds of both factors: its own, and nothing of the other's."""
        mine, none = factor(share, self.bits, self.mantissa), np.zeros_like(share)
        return (mine, none) if rank == SERVER else (none, mine)

    def plain(self, *arguments: Any) -> tuple[Any, ...]:
        """The factors as a JAX array of floats would show them: all of the product, and 1."""
        import jax.numpy as jnp

        (y,) = arguments
        powers = jnp.exp((y * 2.0 ** (FRACTION_BITS - self.bits) - self.offset) * self.log_base)
        return powers * 2.0 ** (TOP - 2 * FRACTION_BITS), jnp.ones_like(y)


def factor(share: Words, bits: int, mantissa: int) -> Words:
    """g^n · round(g^f · 2^mantissa) modulo 2^64 for shares n + f with `bits` fraction bits, g = 2^bits - 1."""
    powers, mantissas = _tables(bits, mantissa)
    found = mantissas[(share & np.uint64(2**bits - 1)).astype(np.int64)]
    exponent = share >> np.uint64(bits)
    for table in powers:
        found = found * table[(exponent & np.uint64(2**WINDOW - 1)).astype(np.int64)]
        exponent = exponent >> np.uint64(WINDOW)
    return found


@lru_cache(maxsize=4)
def _tables(bits: int, mantissa: int) -> tuple[list[Words], Words]:
    base, powers = 2**bits - 1, []
    for _ in range(0, 64 - bits, WINDOW):
        row = [1]
        for _ in range(2**WINDOW - 1):
            row.append(row[-1] * base % 2**64)
        powers.append(np.array(row, np.uint64))
        base = row[-1] * base % 2**64
    fractions = np.arange(2**bits) / 2**bits
    return powers, np.rint(np.exp(fractions * math.log(2**bits - 1)) * 2**mantissa).astype(np.uint64)


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
