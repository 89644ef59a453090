"""Live operators that contract: matrix products and normalizations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from aero_compile.runtime.arithmetic.ciphertexts import REQUEST_BYTES, RESPONSE_BYTES, MatmulCount, matmul
from aero_compile.runtime.arithmetic.constants import (
    in_fixed_point,
    is_public,
    mean,
    scale,
    scale_down,
    scale_up,
    scaled_table,
)
from aero_compile.runtime.arithmetic.roots import inverse_root
from aero_compile.runtime.arithmetic.squares import square, twice_product
from aero_compile.runtime.arithmetic.tolerances import DEFAULT, Tolerances
from aero_compile.runtime.lazy_jax import jnp
from aero_compile.runtime.operators.registry import operator
from aero_compile.runtime.operators.watching import watch

MOST_POLYNOMIALS = 20_000
"""Polynomials that one product may hold at once in Cheetah, of 0.2 MB each: 4 GB."""

SECOND_BYTES = 1_500_000
"""What saving a second of computing may cost in bytes where products are cut or joined: little, bytes come first."""

EXCHANGE_SECONDS, PRODUCT_SECONDS, ROTATION_SECONDS = 5e-3, 2.5e-4, 1.2e-3
"""Of a ciphertext sent, of its product with a polynomial, of an automorphism while answers are packed, on two cores."""


@cache
def piece_size(rows: int, inner: int, columns: int) -> tuple[int, int]:
    """How many rows, and how much of the inner dimension, of [rows, inner] × [inner, columns] to multiply at once.

    Cheetah encodes the matrix that is not encrypted once for each group of rows that share a ciphertext, and holds all
    of it: about rows·inner·columns / 8192 polynomials. Each piece packs its answers anew; pieces of few rows or of
    little depth leave ciphertexts empty.
    """
    found: dict[tuple[int, int], float] = {}
    height = rows
    while True:
        depth = inner
        while depth > 1 and matmul(height, depth, columns).plains > MOST_POLYNOMIALS:
            depth = depth * MOST_POLYNOMIALS // matmul(height, depth, columns).plains
        depth = -(-inner // -(-inner // depth))
        found[height, depth] = sum(
            _price(matmul(min(height, rows - top), min(depth, inner - left), columns))
            for top in range(0, rows, height)
            for left in range(0, inner, depth)
        )
        if height == 1:
            return min(found, key=found.__getitem__)
        height = -(-height // 2)


def _price(count: MatmulCount) -> float:
    """Bytes of a product, and its time as bytes."""
    exchanged = count.sent * REQUEST_BYTES + count.answer_share * RESPONSE_BYTES
    seconds = (
        (count.sent + count.answers) * EXCHANGE_SECONDS
        + count.products * PRODUCT_SECONDS
        + count.rotations * ROTATION_SECONDS
    )
    return exchanged + seconds * SECOND_BYTES


def matrix_product(left: Any, right: Any) -> Any:
    """[rows, inner] × [inner, columns], in as many pieces as memory asks for."""
    rows, inner = left.shape
    height, depth = piece_size(rows, inner, right.shape[1])
    strips = []
    for top in range(0, rows, height):
        strip = None
        for at in range(0, inner, depth):
            part = jnp().matmul(left[top : top + height, at : at + depth], right[at : at + depth])
            strip = part if strip is None else strip + part
        strips.append(strip)
    return strips[0] if len(strips) == 1 else jnp().concatenate(strips, axis=0)


def embed(ids: Any, table: Any) -> Any:
    """Look rows of `table` [V, d] up by one-hot `ids` [..., V]."""
    flat = ids.reshape((-1, ids.shape[-1]))
    return matrix_product(flat, table).reshape((*ids.shape[:-1], *table.shape[1:]))


@cache
def heads_at_once(heads: int, rows: int, inner: int, columns: int) -> int:
    """How many of `heads` products [rows, inner] × [inner, columns] to join into one, for the least price.

    Products side by side are one product with a block-diagonal matrix, [rows, h·inner] × [h·inner, h·columns]: more
    work, but small products leave most of their ciphertexts empty, joined ones fill them.
    """

    def price(joined: int) -> float:
        found = 0.0
        for size, pieces in ((joined, heads // joined), (heads % joined, 1)):
            if size:
                count = matmul(rows, size * inner, size * columns)
                found += pieces * _price(count) if count.plains <= MOST_POLYNOMIALS or size == 1 else math.inf
        return found

    return min(range(1, heads + 1), key=price)


def batched_product(left: Any, right: Any) -> Any:
    """[..., rows, inner] × [..., inner, columns] of equal leading sizes, several at once where that is cheaper."""
    (*lead, rows, inner), columns = left.shape, right.shape[-1]
    heads = math.prod(lead)
    step = heads_at_once(heads, rows, inner, columns)
    public = isinstance(left, np.ndarray) or isinstance(right, np.ndarray)
    if step == 1 or public or tuple(lead) != tuple(right.shape[:-2]):
        return jnp().matmul(left, right)
    left, right = left.reshape((heads, rows, inner)), right.reshape((heads, inner, columns))
    pieces = [_joined(left[at : at + step], right[at : at + step]) for at in range(0, heads, step)]
    return jnp().concatenate(pieces, axis=0).reshape((*lead, rows, columns))


def _joined(left: Any, right: Any) -> Any:
    """[h, rows, inner] × [h, inner, columns] as one product with a block-diagonal matrix."""
    heads, rows, inner = left.shape
    columns = right.shape[2]
    blocks = [jnp().pad(right[i], ((0, 0), (i * columns, (heads - 1 - i) * columns))) for i in range(heads)]
    wide = jnp().swapaxes(left, 0, 1).reshape((rows, heads * inner))
    product = jnp().matmul(wide, jnp().concatenate(blocks, axis=0))
    return jnp().swapaxes(product.reshape((rows, heads, columns)), 0, 1)


def _product(left: Any, right: Any, product: Callable[[Any, Any], Any]) -> Any:
    """`product` of two factors; where one is public, its small rows or columns are held as closely as large ones."""
    factor = None
    if is_public(right):
        right, factor = scaled_table(right, -2 if right.ndim > 1 else -1)
    elif is_public(left):
        left, factor = scaled_table(left, -1)
    found = product(left, right)
    return found if factor is None else scale(found, factor)


@operator("linear")
def _linear(input: Any, weight: Any, bias: Any = None, **_: Any) -> Any:
    def product(rows: Any, columns: Any) -> Any:
        flat = rows.reshape((-1, rows.shape[-1]))  # one matrix product, whatever the batch dimensions
        return matrix_product(flat, columns).reshape((*rows.shape[:-1], columns.shape[1]))

    out = _product(input, weight.T, product)
    return out if bias is None else out + bias


@operator("matmul")
def _matmul(x: Any, other: Any, **_: Any) -> Any:
    if other.ndim == 2 and x.ndim > 2:
        return _linear(x, other.T)
    return _product(x, other, batched_product if x.ndim > 2 else jnp().matmul)


NORM_GAIN = 4.0
"""Norms take the root of 4 times the variance: (x + r)² − x² − r² is 2·x·r, and two more bits of it survive."""

LEAST_EPS = 2.0**-16
"""Under a root eps is no less, so that rounding makes nothing negative of rows of zeros."""


def _scale_rows(
    centered: Any,
    shape: Sequence[int],
    eps: float,
    weight: Any,
    bias: Any,
    tolerances: Tolerances,
    doublings: int,
    folded: bool,
) -> Any:
    """`centered` over the root of its rows' mean square and `eps`, by rows times 2^`doublings`.

    `folded`: they are so already.
    """
    axes = tuple(range(-len(shape), 0))
    if not folded:
        centered = scale_up(centered, doublings) if doublings >= 0 else scale_down(centered, -doublings)
    # The sum of squares is divided once, after the sum: one rounding instead of one an element.
    squares = square(centered)
    variance = scale(squares.sum(axis=axes, keepdims=True), NORM_GAIN / math.prod(shape))
    watch("variance", scale(variance, 1.0 / NORM_GAIN))
    least = max(NORM_GAIN * 4.0**doublings * eps, LEAST_EPS if in_fixed_point() else 0.0)
    out = twice_product(centered, inverse_root(variance + least, tolerances.root), squares)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


@operator("layer_norm")
def _layer_norm(
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    tolerances: Tolerances = DEFAULT,
    doublings: int = 0,
    folded: bool = False,
    **_: Any,
) -> Any:
    axes = tuple(range(-len(normalized_shape), 0))
    centered = input - mean(input, axes, keepdims=True)
    return _scale_rows(centered, normalized_shape, eps, weight, bias, tolerances, doublings, folded)


@operator("rms_norm")
def _rms_norm(
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    eps: float | None = None,
    tolerances: Tolerances = DEFAULT,
    doublings: int = 0,
    folded: bool = False,
    **_: Any,
) -> Any:
    tiny = float(np.finfo(input.dtype).eps) if eps is None else eps
    return _scale_rows(input, normalized_shape, tiny, weight, None, tolerances, doublings, folded)
