"""Matrix products modulo 2^64, exact, as fast as float64 products of the machine's BLAS.

NumPy multiplies matrices of integers one element after the other. Here both are cut in limbs of so few bits that every
sum of products of two limbs stays below 2^53, where float64 adds without rounding; limbs whose product lies above 2^64
altogether are left out. A factor of few bits, such as a weight, is one limb.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from aero_compile.runtime.kernels.words import Integers, Words, widened

EXACT_BITS = 53
"""Whole numbers up to 2^53 are float64 numbers, and so are their sums up to there."""

DEPTH, WIDTH = 512, 8192
"""Rows and columns of the right factor that are converted at once: 32 MB. Of weights below 8 (22 bits with the sign, 18
fraction bits) so few rows leave limbs of 23 bits for the other factor: three."""


SMALL = 2**21
"""A product of fewer multiplications is NumPy's own: it stays in the cache, where it takes 1 ns each."""


WIDENED = 256
"""Columns of a factor in 32 bits that are widened at once for few rows: they stay in the cache."""


FEW_ROWS = 4
"""For so few rows cutting the right factor takes longer than NumPy's product."""


def ring_product(left: Words, right: Words | Integers) -> Words:
    """[..., rows, inner] × [..., inner, columns] modulo 2^64, of words (uint64) with equal leading sizes.

    `right` may also be integers with a sign, int64 or int32.
    """
    *lead, rows, inner = left.shape
    columns = right.shape[-1]
    found = np.zeros((*lead, rows, columns), np.uint64)
    for at in np.ndindex(*lead):
        if rows <= FEW_ROWS:
            found[at] = _few(left[at], right[at])
            continue
        for top in range(0, inner, DEPTH):
            for first in range(0, columns, WIDTH):
                block = right[at][top : top + DEPTH, first : first + WIDTH]
                found[at][:, first : first + WIDTH] += _block(left[at][:, top : top + DEPTH], block)
    return found


def _few(left: Words, right: Words | Integers) -> Words:
    """The product of few rows. Of a matrix that is stored by columns, such as a weight, `einsum` takes a third of the
    time of NumPy's product: 1 ms for one row and 576 × 3,072."""
    if not right.T.flags.c_contiguous:
        return left @ widened(right)
    found, step = np.empty((len(left), right.shape[1]), np.uint64), right.shape[1] or 1
    if right.dtype == np.int32:
        step = WIDENED
    for first in range(0, right.shape[1], step):
        columns = widened(right.T[first : first + step])
        for at, row in enumerate(left):
            found[at, first : first + step] = np.einsum("ij,j->i", columns, row)
    return found


def _block(left: Words, right: Words | Integers) -> Words:
    (rows, inner), columns = left.shape, right.shape[1]
    if rows * inner * columns < SMALL:
        return left @ widened(right)
    budget = EXACT_BITS - (inner - 1).bit_length()
    left_width, right_width = widths(_bits(left), _bits(right), budget)
    found = np.zeros((rows, columns), np.uint64)
    pieces = list(_limbs(left, left_width))
    for number, limb in enumerate(_limbs(right, right_width)):
        kept = [at for at in range(len(pieces)) if at * left_width + number * right_width < 64]
        stacked = np.concatenate([pieces[at] for at in kept]) @ limb  # in one product, which BLAS does faster
        for at, part in zip(kept, np.split(stacked, len(kept)), strict=True):
            found += part.astype(np.int64).view(np.uint64) << np.uint64(at * left_width + number * right_width)
    return found


@cache
def widths(left_bits: int, right_bits: int, budget: int) -> tuple[int, int]:
    """Bits of the limbs of factors of so many bits (the sign is one), for the fewest products of two limbs.

    A limb has a size below 2^bits, or of 2^(bits - 1) where it is all of its factor: together at most 2^`budget`.
    """

    def products(pair: tuple[int, int]) -> int:
        left, right = pair
        shifts = [i + j for i in range(0, left_bits, left) for j in range(0, right_bits, right)]
        return sum(shift < 64 for shift in shifts)

    pairs = [(width, budget - width) for width in range(1, budget)]
    if 1 < right_bits < budget:
        pairs.append((budget - (right_bits - 1), right_bits))
    return min(pairs, key=products)


def _bits(words: Words | Integers) -> int:
    """Bits of the largest of these words, as numbers with a sign."""
    signed = _signed(words)
    largest = max(int(signed.max(initial=0)), -1 - int(signed.min(initial=0)))
    return largest.bit_length() + 1


def _limbs(words: Words | Integers, width: int) -> Iterator[npt.NDArray[np.float64]]:
    """The limbs of words, the lowest first; the highest has the sign."""
    rest, bits = _signed(words), _bits(words)
    while bits > width:
        yield (rest & np.int64(2**width - 1)).astype(np.float64)
        rest, bits = rest >> np.int64(width), bits - width
    yield rest.astype(np.float64)


def _signed(words: Words | Integers) -> npt.NDArray[Any]:
    return words.view(np.int64) if words.dtype == np.uint64 else words
