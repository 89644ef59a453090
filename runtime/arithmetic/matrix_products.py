"""Products of matrices in the pieces, and joined in the groups, that cost least in Cheetah."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aero_compile.runtime.arithmetic.ciphertexts import DEGREE, matmul
from aero_compile.runtime.arithmetic.prices import cached_by_worth, price, round_trip_bytes
from aero_compile.runtime.arithmetic.ring import fraction_bits, in_words
from aero_compile.runtime.arithmetic.truncation import truncated
from aero_compile.runtime.kernels.calls import call_kernel
from aero_compile.runtime.kernels.whole_numbers import WholeNumbers
from aero_compile.runtime.lazy_jax import jnp

MOST_POLYNOMIALS = 20_000
"""Polynomials that one product may hold at once in Cheetah, of 0.2 MB each: 4 GB."""


@cached_by_worth
def packed_columns(rows: int, inner: int, columns: int) -> int:
    """How many columns [rows, inner] × [inner, columns] is best filled up to: as many as it has, or more.

    Answers hold one result in so many coefficients as a block is deep. If all results fit between two of them, SPU
    packs them one by one, with an automorphism for each; one result more, and it packs whole ciphertexts, of which
    there are few: 1 × 128 × 128 takes 140 automorphisms, 1 × 128 × 129 takes 32, for the same bytes.
    """
    found = {columns: price(matmul(rows, inner, columns))}
    depth = 1
    while (depth := 2 * depth) <= min(inner, DEGREE):
        if depth >= rows * columns:
            found[depth // rows + 1] = price(matmul(rows, inner, depth // rows + 1))
    return min(found, key=found.__getitem__)


def _price(rows: int, inner: int, columns: int) -> float:
    return price(matmul(rows, inner, packed_columns(rows, inner, columns)))


def _product(left: Any, right: Any) -> Any:
    """[..., rows, inner] × [..., inner, columns], filled up by columns that are there already.

    Who knows the right matrix knows these too; zeros would make a share of it.
    """
    columns = right.shape[-1]
    wanted = packed_columns(left.shape[-2], left.shape[-1], columns)
    if wanted == columns or isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return jnp().matmul(left, right)
    wide = jnp().concatenate([right] * -(-wanted // columns), axis=-1)[..., :wanted]
    return jnp().matmul(left, wide)[..., :columns]


@cached_by_worth
def piece_size(rows: int, inner: int, columns: int) -> tuple[int, int]:
    """How many rows, and how much of the inner dimension, of [rows, inner] × [inner, columns] to multiply at once.

    Cheetah encodes the matrix that is not encrypted once for each group of rows that share a ciphertext, and holds all
    of it: about rows·inner·columns / 8192 polynomials. Each piece packs its answers anew, and waits for the one before;
    pieces of few rows or of little depth leave ciphertexts empty.
    """
    found: dict[tuple[int, int], float] = {}
    height = rows
    while True:
        depth = inner
        while depth > 1 and matmul(height, depth, columns).plains > MOST_POLYNOMIALS:
            depth = depth * MOST_POLYNOMIALS // matmul(height, depth, columns).plains
        depth = -(-inner // -(-inner // depth))
        found[height, depth] = sum(
            _price(min(height, rows - top), min(depth, inner - left), columns) + round_trip_bytes()
            for top in range(0, rows, height)
            for left in range(0, inner, depth)
        )
        if height == 1:
            return min(found, key=found.__getitem__)
        height = -(-height // 2)


def matrix_product(left: Any, right: Any) -> Any:
    """[rows, inner] × [inner, columns], in as many pieces as memory asks for."""
    rows, inner = left.shape
    height, depth = piece_size(rows, inner, right.shape[1])
    strips = []
    for top in range(0, rows, height):
        strip = None
        for at in range(0, inner, depth):
            part = _product(left[top : top + height, at : at + depth], right[at : at + depth])
            strip = part if strip is None else strip + part
        strips.append(strip)
    return strips[0] if len(strips) == 1 else jnp().concatenate(strips, axis=0)


@cached_by_worth
def heads_at_once(heads: int, rows: int, inner: int, columns: int) -> int:
    """How many of `heads` products [rows, inner] × [inner, columns] to join into one, for the least price.

    Products side by side are one product with a block-diagonal matrix, [rows, h·inner] × [h·inner, h·columns]: more
    work, but small products leave most of their ciphertexts empty, joined ones fill them.
    """

    return min(range(1, heads + 1), key=lambda joined: joined_price(heads, rows, inner, columns, joined))


def joined_price(heads: int, rows: int, inner: int, columns: int, joined: int) -> float:
    """The price of one cross term of `heads` products, `joined` at once and the rest together.

    One product waits for the one before: half a round trip for each of two cross terms, which go side by side. Infinite
    beyond `MOST_POLYNOMIALS`.
    """
    found = 0.0
    for size, pieces in ((joined, heads // joined), (heads % joined, 1)):
        if size:
            one = _price(rows, size * inner, size * columns) + round_trip_bytes() / 2
            plains = matmul(rows, size * inner, size * columns).plains
            found += pieces * one if plains <= MOST_POLYNOMIALS or size == 1 else math.inf
    return found


def batched_product(left: Any, right: Any, owned: tuple[bool, bool] = (False, False)) -> Any:
    """[..., rows, inner] × [..., inner, columns] of equal leading sizes, several at once where that is cheaper.

    `owned`: which of the two one party knows. Several products of shares are truncated together, in one exchange.
    """
    (*lead, rows, inner), columns = left.shape, right.shape[-1]
    heads = math.prod(lead)
    step = heads_at_once(heads, rows, inner, columns)
    public = isinstance(left, np.ndarray) or isinstance(right, np.ndarray)
    if public or tuple(lead) != tuple(right.shape[:-2]):
        return jnp().matmul(left, right)
    left, right = left.reshape((heads, rows, inner)), right.reshape((heads, inner, columns))
    bits = fraction_bits() if step < heads and in_words() and not all(owned) and _are_floats(left, right) else None
    if bits is not None and owned[0]:
        (right,) = call_kernel(WholeNumbers(bits), right)
    elif bits is not None:
        (left,) = call_kernel(WholeNumbers(bits), left)
    pieces = [_product(left, right)] if step == 1 else []
    pieces = pieces or [_joined(left[at : at + step], right[at : at + step]) for at in range(0, heads, step)]
    found = (pieces[0] if len(pieces) == 1 else jnp().concatenate(pieces, axis=0)).reshape((*lead, rows, columns))
    return found if bits is None else truncated(found)


def _are_floats(*factors: Any) -> bool:
    return all(jnp().issubdtype(each.dtype, np.floating) for each in factors)


def _joined(left: Any, right: Any) -> Any:
    """[h, rows, inner] × [h, inner, columns] as one product with a block-diagonal matrix."""
    heads, rows, inner = left.shape
    columns = right.shape[2]
    blocks = [jnp().pad(right[i], ((0, 0), (i * columns, (heads - 1 - i) * columns))) for i in range(heads)]
    wide = jnp().swapaxes(left, 0, 1).reshape((rows, heads * inner))
    product = _product(wide, jnp().concatenate(blocks, axis=0))
    return jnp().swapaxes(product.reshape((rows, heads, columns)), 0, 1)
