"""Live operators that contract: matrix products and normalizations."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from aero_compile.runtime.arithmetic.comparison import maximum
from aero_compile.runtime.arithmetic.element_products import multiply
from aero_compile.runtime.arithmetic.elementary import inverse_root, reciprocal
from aero_compile.runtime.arithmetic.matrix_products import Owners, batched_product, matrix_product
from aero_compile.runtime.arithmetic.public_factors import (
    is_public,
    mean,
    scale,
    scale_down,
    scale_up,
    scaled_table,
    times,
)
from aero_compile.runtime.arithmetic.ring import fraction_bits, in_two_phases
from aero_compile.runtime.arithmetic.row_scaling import scaled_rows
from aero_compile.runtime.arithmetic.row_squares import norms_by_rows, sums_of_squares
from aero_compile.runtime.arithmetic.squares import square, twice_product
from aero_compile.runtime.arithmetic.two_phases import scaled_opened, squared_rows
from aero_compile.runtime.lazy_jax import jnp
from aero_compile.runtime.operators.declaration import operator, watch
from aero_compile.runtime.roles import SERVER
from aero_compile.runtime.tolerances import DEFAULT, Tolerances


def embed(ids: Any, table: Any) -> Any:
    """Look rows of `table` [V, d] up by one-hot `ids` [..., V]."""
    flat = ids.reshape((-1, ids.shape[-1]))
    return matrix_product(flat, table).reshape((*ids.shape[:-1], *table.shape[1:]))


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
def _linear(
    input: Any,
    weight: Any,
    bias: Any = None,
    owned: Collection[str] = (),
    given: Collection[str] = (),
    **_: Any,
) -> Any:
    owners = (None, SERVER if "weight" in owned else None)

    def product(rows: Any, columns: Any) -> Any:
        flat = rows.reshape((-1, rows.shape[-1]))  # one matrix product, whatever the batch dimensions
        multiply = jnp().matmul if "weight" in given else partial(matrix_product, owners=owners)
        return multiply(flat, columns).reshape((*rows.shape[:-1], columns.shape[1]))

    out = _product(input, weight.T, product)
    return out if bias is None else out + bias


@operator("matmul")
def _matmul(x: Any, other: Any, owned: Collection[str] = (), given: Collection[str] = (), **_: Any) -> Any:
    if other.ndim == 2 and x.ndim > 2:
        held = [("weight",) if "other" in names else () for names in (owned, given)]
        return _linear(x, other.T, owned=held[0], given=held[1])
    owners: Owners = (SERVER if "x" in owned else None, SERVER if "other" in owned else None)
    if given or min(x.ndim, other.ndim) < 2:
        return _product(x, other, jnp().matmul if given else partial(_vector_product, owners=owners))
    return _product(x, other, partial(batched_product, owners=owners))


def _vector_product(left: Any, right: Any, owners: Owners) -> Any:
    """A product of which a factor is a vector, as one of matrices."""
    wide = left if left.ndim > 1 else left[None]
    high = right if right.ndim > 1 else right[:, None]
    found = batched_product(wide, high, owners)
    found = found if left.ndim > 1 else found[..., 0, :]
    return found if right.ndim > 1 else found[..., 0]


NORM_GAIN = 4.0
"""Norms take the root of 4 times the variance, and multiply with 2·x: two more bits of it survive."""

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
    owned: bool,
    given: bool,
    invert: Callable[[Any], Any] | None = None,
) -> Any:
    """`centered` over the root of its rows' mean square and `eps`, by rows times 2^`doublings`.

    `folded`: they are so already. `owned`: the server alone knows the weight; `given`: both parties do. `invert`: of
    `NORM_GAIN` times the mean square of those rows, what they are multiplied with, instead of that root with `eps`.
    """
    axes = tuple(range(-len(shape), 0))
    if not folded:
        centered = scale_up(centered, doublings) if doublings >= 0 else scale_down(centered, -doublings)
    width = math.prod(shape)
    rows, squares, opened = centered.reshape((-1, width)), None, None
    # The sum of squares is divided once, after the sum: one rounding instead of one an element.
    if in_two_phases():
        variance, opened = squared_rows(rows, NORM_GAIN / width)
    elif norms_by_rows(*rows.shape):
        variance = scale(sums_of_squares(rows), NORM_GAIN / width)
    else:
        squares = square(centered)
        variance = scale(squares.sum(axis=axes), NORM_GAIN / width)
    variance = variance.reshape((*centered.shape[: -len(shape)], *(1,) * len(shape)))
    watch("variance", scale(variance, 1.0 / NORM_GAIN))
    least = max(NORM_GAIN * 4.0**doublings * eps, LEAST_EPS if fraction_bits() else 0.0)
    inverse = inverse_root(variance + least, tolerances.root) if invert is None else invert(variance)
    if opened is not None:
        out = scaled_opened(opened, inverse.reshape(-1), doublings=1).reshape(centered.shape)
    elif squares is None:
        out = scaled_rows(scale_up(centered, 1).reshape((-1, width)), inverse.reshape(-1)).reshape(centered.shape)
    else:
        out = twice_product(centered, inverse, squares)
    if weight is not None:
        out = out * weight if given else times(out, weight, owned)
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
    owned: Collection[str] = (),
    given: Collection[str] = (),
    **_: Any,
) -> Any:
    axes = tuple(range(-len(normalized_shape), 0))
    centered = input - mean(input, axes, keepdims=True)
    known = ("weight" in owned, "weight" in given)
    return _scale_rows(centered, normalized_shape, eps, weight, bias, tolerances, doublings, folded, *known)


@operator("rms_norm")
def _rms_norm(
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    eps: float | None = None,
    tolerances: Tolerances = DEFAULT,
    doublings: int = 0,
    folded: bool = False,
    owned: Collection[str] = (),
    given: Collection[str] = (),
    **_: Any,
) -> Any:
    tiny = float(np.finfo(input.dtype).eps) if eps is None else eps
    known = ("weight" in owned, "weight" in given)
    return _scale_rows(input, normalized_shape, tiny, weight, None, tolerances, doublings, folded, *known)


@operator("deviation_norm")
def _deviation_norm(
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any,
    bias: Any,
    eps: float,
    centered: bool,
    form: str,
    tolerances: Tolerances = DEFAULT,
    doublings: int = 0,
    folded: bool = False,
    owned: Collection[str] = (),
    given: Collection[str] = (),
    **_: Any,
) -> Any:
    """Rows over √v + ε or max(√v, ε), by the inverse root of v as other norms: no root, and no reciprocal of one."""
    if centered:
        input = input - mean(input, tuple(range(-len(normalized_shape), 0)), keepdims=True)
    invert = partial(_beside_root, eps=eps, form=form, tolerances=tolerances, doublings=doublings)
    known = ("weight" in owned, "weight" in given)
    return _scale_rows(input, normalized_shape, 0.0, weight, bias, tolerances, doublings, folded, *known, invert=invert)


NEGLIGIBLE = 2.0**-19
"""An eps that is added to a deviation and lost in the rounding of the rows: half a unit of 18 fraction bits."""


def _beside_root(variance: Any, eps: float, form: str, tolerances: Tolerances, doublings: int) -> Any:
    """1/(σ + ε) or 1/max(σ, ε) from σ², both in units in which ε is `eps` times 2^`doublings` and √`NORM_GAIN`."""
    beside = math.sqrt(NORM_GAIN) * 2.0**doublings * eps
    if not fraction_bits():
        sigma = jnp().sqrt(variance)
        return 1.0 / (sigma + beside if form == "added" else jnp().maximum(sigma, beside))
    if form == "at_least":
        floor = max(beside**2, LEAST_EPS)
        return inverse_root(maximum(variance, floor) if floor > LEAST_EPS else variance + floor, tolerances.root)
    inverse = inverse_root(variance + LEAST_EPS, tolerances.root)
    if eps < NEGLIGIBLE:
        return inverse
    return multiply(inverse, reciprocal(1.0 + scale(inverse, beside), tolerances.reciprocal))
