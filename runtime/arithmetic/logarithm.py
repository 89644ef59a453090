"""ln x by SPU's own function."""

from __future__ import annotations

from typing import Any

from aero_compile.runtime.arithmetic.tolerances import DEFAULT, Form, cheapest
from aero_compile.runtime.lazy_jax import jnp

LOGARITHMS = (Form("SPU's own", 4e-5, 2960),)
"""Forms of ln x, for 2^-6 ≤ x ≤ 2^8."""


def logarithm(x: Any, tolerance: float = DEFAULT.log) -> Any:
    """ln x for a JAX array, within `tolerance` for 2^-6 ≤ x ≤ 2^8.

    Raises:
        InputError: none of `LOGARITHMS` is as close.
    """
    cheapest("log", LOGARITHMS, tolerance)
    return jnp().log(x)
