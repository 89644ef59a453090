"""Live operators that contract: matrix products and normalizations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aero_compile.runtime.ciphertexts import matmul
from aero_compile.runtime.operators import jnp, operator
from aero_compile.runtime.squares import square

MOST_POLYNOMIALS = 20_000
"""Polynomials that one product may hold at once in Cheetah, of 0.2 MB each: 4 GB."""


def rows_at_once(rows: int, inner: int, columns: int) -> int:
    """How many rows of [rows, inner] × [inner, columns] to multiply at once so that memory lasts.

    Cheetah encodes the matrix that is not encrypted once for each group of rows that share a ciphertext, and holds all
    of it: about rows·inner·columns / 8192 polynomials. Products of fewer rows one after the other exchange nearly the
    same ciphertexts.
    """
    while rows > 1 and matmul(rows, inner, columns).plains > MOST_POLYNOMIALS:
        rows = -(-rows // 2)
    return rows


def matrix_product(left: Any, right: Any) -> Any:
    """[rows, inner] × [inner, columns], in as many pieces as memory asks for."""
    rows, inner = left.shape
    step = rows_at_once(rows, inner, right.shape[1])
    pieces = [jnp().matmul(left[start : start + step], right) for start in range(0, rows, step)]
    return pieces[0] if len(pieces) == 1 else jnp().concatenate(pieces, axis=0)


@operator("linear")
def _linear(input: Any, weight: Any, bias: Any = None, **_: Any) -> Any:
    flat = input.reshape((-1, input.shape[-1]))  # one matrix product, whatever the batch dimensions
    out = matrix_product(flat, weight.T).reshape((*input.shape[:-1], weight.shape[0]))
    return out if bias is None else out + bias


@operator("matmul", "mm", "bmm")
def _matmul(x: Any, other: Any = None, mat2: Any = None, **_: Any) -> Any:
    right = other if other is not None else mat2
    if right.ndim == 2 and x.ndim > 2:
        return _linear(x, right.T)
    return jnp().matmul(x, right)


@operator("einsum")
def _einsum(equation: str, tensors: Sequence[Any], **_: Any) -> Any:
    return jnp().einsum(equation, *tensors)


@operator("addmm", "baddbmm")
def _addmm(
    x: Any,
    mat1: Any = None,
    mat2: Any = None,
    batch1: Any = None,
    batch2: Any = None,
    beta: Any = 1,
    alpha: Any = 1,
    **_: Any,
) -> Any:
    product = _matmul(mat1, mat2) if mat1 is not None else _matmul(batch1, batch2)
    return (product if alpha == 1 else product * alpha) + (x if beta == 1 else x * beta)


NORM_GAIN = 4.0
"""Norms take the root of 4 times the variance: two more bits of it survive the fixed point."""


def _scale_rows(centered: Any, shape: Sequence[int], eps: float, weight: Any, bias: Any) -> Any:
    import jax

    axes = tuple(range(-len(shape), 0))
    # The sum of squares is divided once, after the sum: one rounding instead of one an element.
    variance = square(centered).sum(axis=axes, keepdims=True) * (NORM_GAIN / math.prod(shape))
    half = jax.lax.rsqrt(variance + NORM_GAIN * eps)
    out = centered * (half + half)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


@operator("layer_norm", "native_layer_norm")
def _layer_norm(
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    **_: Any,
) -> Any:
    axes = tuple(range(-len(normalized_shape), 0))
    mean = input.sum(axis=axes, keepdims=True) * (1.0 / math.prod(normalized_shape))
    return _scale_rows(input - mean, normalized_shape, eps, weight, bias)


@operator("rms_norm")
def _rms_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None, **_: Any
) -> Any:
    tiny = float(np.finfo(input.dtype).eps) if eps is None else eps
    return _scale_rows(input, normalized_shape, tiny, weight, None)
