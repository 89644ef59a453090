"""Products of a secret with public numbers, means, and powers of two.

A public number is held with f fraction bits, as secrets are: 1/768 is 341.33 units of 2^-18, which SPU cuts to 341, and
10^-6 becomes 0. So a small number is written as m·2^-j with 1/2 ≤ m < 1, and multiplied in two or more products: first
with 2^-j, which every format holds exactly and which leaves the most room for large values, then with m. Each product
rounds once, so the result is within three units of the last place and relatively within 2^-f.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from aero_compile.runtime.arithmetic.ring import fraction_bits
from aero_compile.runtime.arithmetic.row_scaling import broadcast_product
from aero_compile.runtime.lazy_jax import jnp

Array = npt.NDArray[np.float64]

MOST_HALVINGS = 16
"""Of one product: SPU multiplies with a number below 2^(2-f) in a way of its own, which leaves less room."""


def is_public(value: Any) -> bool:
    """Whether an operator's argument is a number or an array that both parties know, not a JAX array."""
    return isinstance(value, (int, float, np.ndarray, np.generic))


def scale(x: Any, factor: Any) -> Any:
    """x · `factor` for a JAX array of floats and a public number, or an array that broadcasts with x."""
    bits = fraction_bits()
    if bits is None:
        return x * factor
    wanted = np.asarray(factor, np.float64)
    if (wanted == 1).all():
        return jnp().broadcast_to(x, np.broadcast_shapes(x.shape, wanted.shape))
    *powers, last = _factors(wanted, bits)
    for power in powers:
        # One unit more, about what two roundings down lose: without it the compiler multiplies both numbers first.
        x = x * _constant(power) + _constant(np.where(power < 1, 2.0**-bits, 0.0))
    return x * _constant(last)


def _factors(wanted: Array, bits: int) -> list[Array]:
    """Numbers that the format holds, to be multiplied with one after the other.

    All but the last of a small number are powers of two, and ones follow what is held at once: where x grows, it does
    before it is rounded.
    """
    found, left, most = [], wanted, max(1, min(MOST_HALVINGS, bits - 2))
    while (small := ~_is_held(left, bits)).any():
        halvings = np.where(small, np.minimum(-np.frexp(left)[1], most), 0)
        found.append(np.where(small, np.ldexp(1.0, -halvings), _rounded(left, bits)))
        left = np.where(small, np.ldexp(left, halvings), 1.0)
    return [*found, _rounded(left, bits)]


def times(value: Any, factor: Any, owned: bool = False) -> Any:
    """value · factor of secrets and public numbers; `owned`: the server alone knows the factor."""
    if is_public(factor) and np.ndim(factor) == 0 and factor == 1:
        return value
    if is_public(factor):
        return value * factor if is_public(value) else scale(value, factor)
    return scale(factor, value) if is_public(value) else broadcast_product(value, factor, owned)


def _is_held(numbers: Array, bits: int) -> npt.NDArray[np.bool_]:
    """Which numbers the format holds as closely as the numbers between 1/2 and 1."""
    return np.asarray(np.abs(_rounded(numbers, bits) - numbers) <= np.abs(numbers) * 2.0**-bits)


def _rounded(numbers: Array, bits: int) -> Array:
    return np.asarray(np.ldexp(np.rint(np.ldexp(numbers, bits)), -bits))


def _constant(numbers: Array) -> npt.NDArray[np.float32]:
    return np.asarray(numbers, np.float32)


def scale_up(x: Any, doublings: int) -> Any:
    """x · 2^`doublings` for a JAX array, by sums: exact, and nothing is sent."""
    for _ in range(doublings):
        x = x + x
    return x


def scale_down(x: Any, halvings: int) -> Any:
    """x · 2^-`halvings` for a JAX array, up to two units of the last place, safe to be multiplied with afterwards.

    The unit that is added keeps the compiler from multiplying later factors with 2^-`halvings` first.
    """
    bits = fraction_bits()
    return x * 2.0**-halvings if bits is None else x * np.float32(2.0**-halvings) + np.float32(2.0**-bits)


def mean(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """Mean of a JAX array, within a few units of the last place however large it is.

    The mean of what is left after subtracting a first mean corrects the error of 1/n, which large means multiply.
    """
    total = x.sum(axis=axis, keepdims=True)
    count = math.prod(x.shape) // max(1, math.prod(total.shape))
    found = scale(total, 1.0 / count)
    bits = fraction_bits()
    if bits is not None and count & (count - 1):
        found = found + scale((x - found).sum(axis=axis, keepdims=True), 1.0 / count)
    return found if keepdims else found.squeeze(axis=axis)


def scaled_table(table: npt.NDArray[Any], axis: int | None) -> tuple[npt.NDArray[Any], Array | None]:
    """A public factor of a matrix product that is summed along `axis`, and what to scale the product with.

    Entries that are small along the whole axis, such as those of an averaging matrix, are held as powers of two times
    larger ones; None: there are no such.
    """
    bits = fraction_bits()
    if bits is None or table.dtype.kind != "f" or not table.size:
        return table, None
    wanted = table.astype(np.float64)
    halvings = np.maximum(0, -np.frexp(np.abs(wanted).max(axis=axis, keepdims=True))[1])
    if _is_held(wanted, bits).all() or not halvings.any():
        return _constant(_rounded(wanted, bits)), None
    return _constant(_rounded(np.ldexp(wanted, halvings), bits)), np.ldexp(1.0, -halvings)
