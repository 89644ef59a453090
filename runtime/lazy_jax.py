"""JAX, imported when it is first needed: parties and the cost model do without it."""

from __future__ import annotations

from typing import Any


def jnp() -> Any:
    """Return `jax.numpy`."""
    import jax.numpy

    return jax.numpy
