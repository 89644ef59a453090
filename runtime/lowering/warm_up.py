"""A short computation that makes both parties do their one-time set-up: keys, oblivious transfers, cached triples.

SPU sets each of these up when an operation first needs it. Running one of each kind before a forward is measured
gives the bytes of a second forward at the price of one.
"""

from __future__ import annotations

from typing import Any

from aero_compile.runtime.lowering.live import LiveStep
from aero_compile.runtime.program_parts import SET_UP, set_up_inputs


def one_of_each(server: Any, client: Any) -> tuple[Any]:
    """Product of matrices, owned and shared; element-wise product, square, comparison, reciprocal and root."""
    import jax
    import jax.numpy as jnp

    side = server.shape[0]
    shared = jnp.matmul(server, client)
    batched = jnp.matmul(shared.reshape(4, side // 4, side), shared.reshape(4, side, side // 4))
    squared = jnp.exp(shared * server * shared)
    chosen = jnp.where(shared > 0.5, squared, shared) + 1.0
    small = 1.0 / chosen[:8] + jax.lax.rsqrt(chosen[:8])
    return (jnp.sum(small * small) + jnp.sum(batched),)


def warm_up_step(side: int) -> LiveStep:
    """Return the computation, of operands [side, side], as a step that can be compiled like any other."""
    inputs = set_up_inputs(side)
    names, shapes, dtypes = zip(*((spec.name, spec.shape, spec.dtype) for spec in inputs), strict=True)
    return LiveStep(SET_UP, "no part of the model", SET_UP, names, (SET_UP,), shapes, dtypes, one_of_each)
