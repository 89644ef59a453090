"""√x and 1/√x by SPU's own functions, the latter with one more step where that is asked for."""

from __future__ import annotations

from typing import Any

from aero_compile.runtime.arithmetic.element_products import multiply
from aero_compile.runtime.arithmetic.tolerances import DEFAULT, Form, cheapest
from aero_compile.runtime.lazy_jax import jnp

QUARTIC = Form("quartic on the mantissa", 7e-4, 2340)
"""SPU's own."""

INVERSE_ROOTS = (QUARTIC, Form(f"{QUARTIC.method}, and an iteration of Newton's", 1.5e-4, 3005))
"""Forms of 1/√x; errors are relative, for 2^-6 ≤ x ≤ 2^8."""

ROOTS = (Form("SPU's own", 1e-4, 3225),)
"""The same for √x."""


def inverse_root(x: Any, tolerance: float = DEFAULT.root) -> Any:
    """1/√x for a JAX array, relatively within `tolerance` for 2^-6 ≤ x ≤ 2^8, by the cheapest of `INVERSE_ROOTS`.

    Raises:
        InputError: none is as close.
    """
    import jax

    first = jax.lax.rsqrt(x)
    if cheapest("inverse root", INVERSE_ROOTS, tolerance) is QUARTIC:
        return first
    # (x·r)·r and not x·r²: the square of a small r has few bits left.
    return first + multiply(first, 0.5 - 0.5 * multiply(multiply(x, first), first))


def root(x: Any, tolerance: float = DEFAULT.root) -> Any:
    """√x for a JAX array, relatively within `tolerance` for 2^-6 ≤ x ≤ 2^8.

    Raises:
        InputError: none of `ROOTS` is as close.
    """
    cheapest("root", ROOTS, tolerance)
    return jnp().sqrt(x)
