"""√x and 1/√x by SPU's own functions, the latter with one more step where that is asked for."""

from __future__ import annotations

from typing import Any

from aero_compile.runtime.arithmetic.filling import multiply
from aero_compile.runtime.arithmetic.tolerances import DEFAULT, cheapest
from aero_compile.runtime.lazy_jax import jnp

INVERSE_ROOTS = {"quartic": 7e-4, "newton": 1.5e-4}
"""Forms of 1/√x and their largest relative errors for 2^-6 ≤ x ≤ 2^8, measured in Cheetah and rounded up."""

ROOTS = {"SPU": 1e-4}
"""The same for √x."""


def inverse_root(x: Any, tolerance: float = DEFAULT.root) -> Any:
    """1/√x for a JAX array, relatively within ``tolerance`` for 2^-6 ≤ x ≤ 2^8, by the cheapest of ``INVERSE_ROOTS``.

    "quartic" is SPU's own, a polynomial of the mantissa; "newton" adds a step of Newton's.

    Raises:
        InputError: none is as close.
    """
    import jax

    first = jax.lax.rsqrt(x)
    if cheapest("inverse root", INVERSE_ROOTS, tolerance) == "quartic":
        return first
    # (x·r)·r and not x·r²: the square of a small r has few bits left.
    return first + multiply(first, 0.5 - 0.5 * multiply(multiply(x, first), first))


def root(x: Any, tolerance: float = DEFAULT.root) -> Any:
    """√x for a JAX array, relatively within ``tolerance`` for 2^-6 ≤ x ≤ 2^8.

    Raises:
        InputError: none of ``ROOTS`` is as close.
    """
    cheapest("root", ROOTS, tolerance)
    return jnp().sqrt(x)
