"""Element-wise products whose ciphertexts are full.

Cheetah computes a large element-wise product in two halves, each in whole ciphertexts of 8192 values: for 16,385
values both send twice as much as for 16,384. So a large operand is cut where ciphertexts are full, and the few values
that are left take stored triples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from aero_compile.runtime.costs.ciphertexts import DEGREE
from aero_compile.runtime.lazy_jax import jnp

PAIR = 2 * DEGREE
"""Values in one full ciphertext for each half."""

FEW_SQUARES = 3500
"""Fewer squares than this cost less as products by stored triples (310 bytes each) than as one more ciphertext."""

FEW_PRODUCTS = 11_000
"""The same of products, which would need two more ciphertexts and as many again for their second factor."""


FEW_OWNED = 3_500
"""The same of products with values that one party knows, which take one ciphertext for so many as `DEGREE`."""


def square_parts(size: int) -> list[int]:
    """Cut `size` squares: all parts but the last take ciphertexts, the last (maybe of no values) stored triples."""
    rest = size % PAIR
    if rest >= DEGREE + FEW_SQUARES:
        return [size, 0]
    whole = [size - rest] if size > rest else []
    if rest >= DEGREE:
        return [*whole, DEGREE, rest - DEGREE]
    return [*whole, rest, 0] if rest >= FEW_SQUARES else [*whole, rest]


def product_parts(size: int) -> list[int]:
    """Cut `size` products of two secrets: SPU itself takes stored triples for parts smaller than `PAIR`."""
    rest = size % PAIR
    return [size] if size < PAIR or rest == 0 or rest >= FEW_PRODUCTS else [size - rest, rest]


def owned_parts(size: int) -> list[int]:
    """Cut `size` products with values of one party: all parts but the last take ciphertexts, stored triples."""
    rest = size % DEGREE
    return [size, 0] if rest >= FEW_OWNED or not rest else [*([size - rest] if size > rest else []), rest]


def multiply(x: Any, y: Any) -> Any:
    """x · y for two JAX arrays of floats that broadcast together."""
    shape = jnp().broadcast_shapes(x.shape, y.shape)
    parts = product_parts(math.prod(shape))
    if len(parts) == 1:
        return x * y
    factors = [jnp().broadcast_to(each, shape) for each in (x, y)]
    return by_parts(factors, parts, [lambda a, b: a * b] * len(parts))


def by_parts(arrays: Sequence[Any], parts: Sequence[int], functions: Sequence[Callable[..., Any]]) -> Any:
    """Apply one element-wise function to each part of arrays of one shape, cut in their flat order."""
    flat = [each.reshape(-1) for each in arrays]
    found, start = [], 0
    for size, function in zip(parts, functions, strict=True):
        if size:
            found.append(function(*(each[start : start + size] for each in flat)))
        start += size
    return jnp().concatenate(found).reshape(arrays[0].shape)
