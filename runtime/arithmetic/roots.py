"""√x and 1/√x by SPU's own functions, the latter with one more step where that is asked for.

In two phases 1/√x is composed of what is prepared. SPU looks for the highest of 64 bits; here x is compared with the
powers of four of the range on which it holds, all at once, as a sum of a softmax is with powers of two
(`reciprocal.py`): the bits add up to scales 4^-j, which brings x to [1, 4), where a chain of squares is 1/√x, and 2^-j.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aero_compile.runtime.arithmetic.coefficients import ROOT
from aero_compile.runtime.arithmetic.comparison import at_least
from aero_compile.runtime.arithmetic.element_products import multiply
from aero_compile.runtime.arithmetic.ring import in_two_phases
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

    first = _by_comparisons(x) if in_two_phases() else jax.lax.rsqrt(x)
    if cheapest("inverse root", INVERSE_ROOTS, tolerance) is QUARTIC:
        return first
    # (x·r)·r and not x·r²: the square of a small r has few bits left.
    return first + multiply(first, 0.5 - 0.5 * multiply(multiply(x, first), first))


LEAST_POWER, LARGEST_POWER = -3, 8
"""Powers of four between which and the next one x lies: 2^-6 ≤ x < 2^18."""


def _by_comparisons(x: Any) -> Any:
    powers = np.arange(LEAST_POWER + 1, LARGEST_POWER + 1).reshape((-1, *(1,) * x.ndim))
    larger = at_least(x, 4.0 ** powers.ravel())

    def scale(base: float) -> Any:
        """base^-j, where j is the last power that x reaches."""
        steps = base ** (1.0 - powers) - base ** -powers.astype(np.float64)
        return base**-LEAST_POWER - jnp().where(larger, steps.astype(np.float32), 0.0).sum(axis=0)

    return multiply(ROOT(multiply(x, scale(4.0))), scale(2.0))


def root(x: Any, tolerance: float = DEFAULT.root) -> Any:
    """√x for a JAX array, relatively within `tolerance` for 2^-6 ≤ x ≤ 2^8.

    Raises:
        InputError: none of `ROOTS` is as close.
    """
    cheapest("root", ROOTS, tolerance)
    return jnp().sqrt(x)
