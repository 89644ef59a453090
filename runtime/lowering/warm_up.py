"""A short computation that makes both parties do their one-time set-up: keys, oblivious transfers, cached triples.

SPU sets each of these up when an operation first needs it. Running one of each kind before a forward is measured
gives the bytes of a second forward at the price of one.
"""

from __future__ import annotations

from typing import Any

from aero_compile.runtime.lowering.live import LiveStep
from aero_compile.runtime.program_parts import SET_UP, SET_UP_INPUTS, SET_UP_SIDE


def one_of_each(server: Any, client: Any) -> tuple[Any]:
    """Product of matrices, owned and shared; element-wise product, square, comparison, reciprocal and root."""
    import jax
    import jax.numpy as jnp

    quarter = SET_UP_SIDE // 4
    shared = jnp.matmul(server, client)
    batched = jnp.matmul(shared.reshape(4, quarter, SET_UP_SIDE), shared.reshape(4, SET_UP_SIDE, quarter))
    squared = jnp.exp(shared * server * shared)
    chosen = jnp.where(shared > 0.5, squared, shared) + 1.0
    small = 1.0 / chosen[:8] + jax.lax.rsqrt(chosen[:8])
    return (jnp.sum(small * small) + jnp.sum(batched),)


STEP = LiveStep(
    SET_UP,
    "no part of the model",
    SET_UP,
    tuple(spec.name for spec in SET_UP_INPUTS),
    (SET_UP,),
    tuple(spec.shape for spec in SET_UP_INPUTS),
    tuple(spec.dtype for spec in SET_UP_INPUTS),
    one_of_each,
)
"""The computation as a step that can be compiled like any other."""
