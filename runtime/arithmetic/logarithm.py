"""ln x by SPU's own function."""

from __future__ import annotations

from typing import Any

from aero_compile.runtime.arithmetic.tolerances import DEFAULT, cheapest
from aero_compile.runtime.lazy_jax import jnp

LOGARITHMS = {"SPU": 4e-5}
"""Forms of ln x and their largest errors for 2^-6 ≤ x ≤ 2^8, measured in Cheetah and rounded up."""


def logarithm(x: Any, tolerance: float = DEFAULT.log) -> Any:
    """ln x for a JAX array, within ``tolerance`` for 2^-6 ≤ x ≤ 2^8.

    Raises:
        InputError: none of ``LOGARITHMS`` is as close.
    """
    cheapest("log", LOGARITHMS, tolerance)
    return jnp().log(x)
