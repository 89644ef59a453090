"""Products whose secret work is done before the tokens are known, and the truncation of what they give."""

from __future__ import annotations

from typing import Any

import numpy as np

from aero_compile.runtime.arithmetic.ring import fraction_bits
from aero_compile.runtime.kernels.calls import call_kernel
from aero_compile.runtime.kernels.triple_elements import TripleElements
from aero_compile.runtime.lazy_jax import jnp


def product_of_owned(servers: Any, clients: Any) -> Any:
    """`servers` times `clients`, two JAX arrays of one shape that only the server and only the client know."""
    (found,) = call_kernel(TripleElements(True), servers[..., None], clients)
    return truncated(found.reshape(clients.shape))


def product_of_rows(x: Any, numbers: Any) -> Any:
    """Rows of x [R, w] times `numbers` [R], both secret."""
    (found,) = call_kernel(TripleElements(False, x.shape[1]), x, numbers)
    return truncated(found)


def truncated(product: Any) -> Any:
    """A product whose words were not truncated, as SPU truncates its own: once, by the fraction bits.

    A product of numbers with 2^-f, the last bit of the format, would not do: SPU takes such a number with more bits,
    and the product leaves the ring. A matrix product takes it as it is.
    """
    bits = fraction_bits()
    if bits is None:
        return product
    unit = np.full((1, 1), 2.0**-bits, np.float32)
    return jnp().matmul(product.reshape((-1, 1)), unit).reshape(product.shape)
