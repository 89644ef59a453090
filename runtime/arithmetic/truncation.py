"""The truncation of a product of words that SPU took for whole numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from aero_compile.runtime.arithmetic.ring import fraction_bits, in_two_phases
from aero_compile.runtime.lazy_jax import jnp


def truncated(product: Any, by: int | None = None) -> Any:
    """A product whose words were not truncated, as SPU truncates its own: once, by the fraction bits.

    `by`: so many bits instead, in two phases, where steps on shares hold 2^-`by` (`aero_compile.runtime.online`).

    A product of numbers with 2^-f, the last bit of the format, would not do: SPU takes such a number with more bits,
    and the product leaves the ring. A matrix product takes it as it is.
    """
    bits = fraction_bits()
    if bits is None:
        return product
    unit, size = np.float32(2.0 ** -(by or bits)), product.size
    if not in_two_phases():
        return jnp().matmul(product.reshape((-1, 1)), np.full((1, 1), unit)).reshape(product.shape)
    # In pairs: XLA makes a product of numbers of a matrix product with a single number, where the result is read twice.
    pairs = jnp().pad(product.reshape(-1), (0, size % 2)).reshape((-1, 2))
    return jnp().matmul(pairs, np.eye(2, dtype=np.float32) * unit).reshape(-1)[:size].reshape(product.shape)
