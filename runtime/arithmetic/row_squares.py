"""Sums of squares of rows as one product of matrices that one party knows each, and norms made of them.

What the parties do with their shares, and why it is right, is told in `kernels/square_terms.py`. The product goes in
strips of rows, of each of which the diagonal is read. All terms have twice the fraction bits and are rounded once,
after they were added: 2^62 is room for sums up to 2^26 (18 fraction bits).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aero_compile.runtime.arithmetic.ciphertext_packing import square_parts
from aero_compile.runtime.arithmetic.evaluators import is_hidden
from aero_compile.runtime.arithmetic.ring import fraction_bits, in_words
from aero_compile.runtime.arithmetic.row_products import STORED_BYTES, cheapest_strips, scaling_price
from aero_compile.runtime.costs.ciphertexts import DEGREE, matmul
from aero_compile.runtime.costs.prices import (
    cached_by_worth,
    element_seconds,
    price,
    round_trip_bytes,
    second_bytes,
)
from aero_compile.runtime.kernels.kernel import call_kernel
from aero_compile.runtime.kernels.local_kernels import SquareTerms
from aero_compile.runtime.lazy_jax import jnp
from aero_compile.runtime.roles import CLIENT, SERVER

SQUARE_BYTES = 144
"""Of a square of a share."""


@cached_by_worth
def square_strips(rows: int, width: int) -> tuple[int, float]:
    """The height of the cheapest strips of X_0·X_1ᵀ for shares [rows, width], and the price in bytes.

    Each has one answer: several would show the evaluator's share (`evaluators`).
    """

    def price_of(size: int, count: int) -> float:
        if not is_hidden((size, width, size), SERVER, CLIENT):
            return math.inf
        return count * (price(matmul(size, width, size)) + round_trip_bytes())

    return cheapest_strips(rows, price_of)


def norms_by_rows(rows: int, width: int) -> bool:
    """Whether rows [rows, width] are cheaper squared, and multiplied with a number each, as products of matrices.

    Never outside the 64-bit ring, where kernels do not work. Else each takes a square for every element.
    """
    if not in_words():
        return False
    *whole, last = square_parts(rows * width)
    square = SQUARE_BYTES + element_seconds("product_both_ways_1") * second_bytes()
    waiting = round_trip_bytes() * (len(whole) + (last > 0))
    elements = sum(-(-part // DEGREE) * DEGREE * square for part in whole) + last * STORED_BYTES + waiting
    return square_strips(rows, width)[1] + scaling_price(rows, width, False) < 2 * elements


def sums_of_squares(x: Any) -> Any:
    """Σ x² of each row of a JAX array [R, w], traced for the 64-bit ring: [R], |Σ x²| < 2^(62 - 2f)."""
    bits = fraction_bits()
    assert bits is not None
    mine, theirs, alone = call_kernel(SquareTerms(x.shape[1], bits), x)
    terms = jnp().stack([alone, products_of_two(mine, theirs)], axis=-1)
    return terms @ np.asarray([2.0**-bits, 2.0 ** (1 - bits)], np.float32)


def products_of_two(mine: Any, theirs: Any) -> Any:
    """Σ x·y of the rows of two arrays [R, w], each of which one party alone knows: [R]; whole numbers, or floats."""
    height, _ = square_strips(*mine.shape)
    strips = range(0, len(mine), height)
    return jnp().concatenate([_diagonal(mine[at : at + height], theirs[at : at + height]) for at in strips])


def _diagonal(left: Any, right: Any) -> Any:
    """Products of the rows of two matrices [s, w], each row with its own: [s]."""
    size = left.shape[0]
    return jnp().matmul(left, right.T).reshape(-1)[:: size + 1]
