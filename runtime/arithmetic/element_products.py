"""Products of elements of two secrets: by SPU, or with a preparation."""

from __future__ import annotations

from typing import Any

from aero_compile.runtime.arithmetic import ciphertext_packing as filling
from aero_compile.runtime.arithmetic.ring import in_two_phases
from aero_compile.runtime.arithmetic.two_phases import product_of_elements
from aero_compile.runtime.lazy_jax import jnp


def multiply(x: Any, y: Any) -> Any:
    """x · y for two JAX arrays of floats that broadcast together, both secret."""
    if not in_two_phases():
        return filling.multiply(x, y)
    shape = jnp().broadcast_shapes(x.shape, y.shape)
    return product_of_elements(jnp().broadcast_to(x, shape), jnp().broadcast_to(y, shape))


def multiply_whole(x: Any, y: Any) -> Any:
    """The same, which SPU computes at once, however full the last ciphertext is."""
    return multiply(x, y) if in_two_phases() else x * y
