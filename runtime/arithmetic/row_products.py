"""Rows times one number each, as matrix products.

r∘X with one number of r for each row of X is diag(r)·X. In Cheetah a product of two shares sends 221 bytes for each
element of X; the answers of a matrix product are packed, so diag(r)·X sends about 60 to 110, for more work. The rows go
in strips: a low one has a small diagonal matrix, quickly multiplied and packed, a high one fills its ciphertexts. The
worth of a second (`second_bytes`) chooses the height, and whether any is better than a product of elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from aero_compile.runtime.arithmetic.ciphertext_packing import PAIR, multiply, product_parts
from aero_compile.runtime.arithmetic.matrix_products import SHARES, batched_product, heads_at_once, joined_price
from aero_compile.runtime.arithmetic.ring import in_words
from aero_compile.runtime.costs.ciphertexts import DEGREE
from aero_compile.runtime.costs.prices import cached_by_worth, element_seconds, round_trip_bytes, second_bytes
from aero_compile.runtime.lazy_jax import jnp
from aero_compile.runtime.roles import SERVER

HIGHEST = 256
"""Rows of the highest strip that is tried: a higher one only takes longer."""

SHARED_BYTES, OWNED_BYTES, STORED_BYTES = 221, 143, 310
"""An element of a product of two shares, of a share with what one party knows, and of shares by stored triples."""


@cached_by_worth
def scaling_strips(rows: int, width: int, owned: bool = False) -> tuple[int, float]:
    """The height of the cheapest strips of diag(r)·X for X [rows, width], and the price in bytes of one cross term.

    `owned`: r is the server's.
    """
    owners = (SERVER, None) if owned else SHARES

    def price_of(size: int, count: int) -> float:
        joined = heads_at_once(count, size, size, width, owners)
        return joined_price(count, size, size, width, joined, owners)

    return cheapest_strips(rows, price_of)


def cheapest_strips(rows: int, price_of: Callable[[int, int], float]) -> tuple[int, float]:
    """The cheapest height to cut so many rows into, and its price; `price_of` takes a height and how many strips."""
    found, height = {}, min(rows, HIGHEST)
    while True:
        whole, rest = divmod(rows, height)
        found[height] = price_of(height, whole) + (price_of(rest, 1) if rest else 0.0)
        if height == 1:
            return min(found.items(), key=lambda item: item[1])
        height = -(-height // 2)


def scaling_price(rows: int, width: int, owned: bool) -> float:
    """The price in bytes of rows times numbers as a matrix product; `owned`: one party knows the numbers.

    Infinite where a function is not traced for the 64-bit ring: in others, SPU does not pack answers.
    """
    return scaling_strips(rows, width, owned)[1] * (1 if owned else 2) if in_words() else math.inf


def element_price(size: int, owned: bool) -> float:
    """The price in bytes of `size` products of elements."""
    if owned:
        one_way = OWNED_BYTES + element_seconds("product_one_way") * second_bytes()
        return -(-size // DEGREE) * DEGREE * one_way + round_trip_bytes()
    shared = SHARED_BYTES + element_seconds("product_both_ways_2") * second_bytes()
    return sum(
        (part * STORED_BYTES if part < PAIR else -(-part // PAIR) * PAIR * shared) + round_trip_bytes()
        for part in product_parts(size)
    )


def rows_price(rows: int, width: int, elements: int) -> float:
    """The price in bytes of shared rows [rows, width], of which `elements` count, times a shared number each."""
    return min(element_price(elements, False), scaling_price(rows, width, False))


def products_of_rows(x: Any, numbers: Any) -> Any:
    """Rows of integers x [..., w] times `numbers` [...], both secret, in the cheaper way."""
    x, width = x.reshape((-1, x.shape[-1])), x.shape[-1]
    numbers, shape = numbers.reshape(-1), (*numbers.shape, width)
    if scaling_price(numbers.size, width, False) < element_price(x.size, False):
        return by_matrices(x, numbers, False).reshape(shape)
    return multiply(x, numbers[:, None]).reshape(shape)


def by_matrices(x: Any, numbers: Any, owned: bool) -> Any:
    """Rows of x [R, w] times `numbers` [R], as products of matrices; `owned`: the numbers are one party's."""
    rows, width = x.shape
    height, _ = scaling_strips(rows, width, owned)
    owners = (SERVER, None) if owned else SHARES
    whole = rows // height * height
    strips = []
    for start, end, size in ((0, whole, height), (whole, rows, rows - whole)):
        if end > start:
            diagonals = _diagonals(numbers[start:end].reshape((-1, size)), owned)
            part = x[start:end].reshape((-1, size, width))
            strips.append(batched_product(diagonals, part, owners).reshape((-1, width)))
    return strips[0] if len(strips) == 1 else jnp().concatenate(strips, axis=0)


def _diagonals(numbers: Any, owned: bool) -> Any:
    """[n, s] → diagonal matrices [n, s, s].

    What one party owns it multiplies with ones and zeros by itself: padding would make a share of it. Of shares the
    entries are moved, for nothing: s + 1 places lie between one and the next.
    """
    count, size = numbers.shape
    if owned:
        return numbers[..., None] * np.eye(size, dtype=numbers.dtype)
    spread = jnp().pad(numbers[..., None], ((0, 0), (0, 0), (0, size)))
    return spread.reshape((count, -1))[:, : size * size].reshape((count, size, size))
