"""1/x: of any number by SPU's own reciprocal, and of the sums of a softmax by less.

A sum S of a softmax lies between 1 and the number of a row's entries. Where that is known, SPU's reciprocal does too
much: it looks for the highest of 64 bits. Here S is compared with the powers of two up to the number of entries, all at
once; the bits add up to a scale 2^-j that brings S to [1, 2), where a chain of squares is 1/x.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aero_compile.runtime.arithmetic.coefficients import RECIPROCAL
from aero_compile.runtime.arithmetic.comparison import SMALL_RING_HOLDS, at_least
from aero_compile.runtime.arithmetic.constants import is_public
from aero_compile.runtime.arithmetic.element_products import multiply
from aero_compile.runtime.arithmetic.row_scaling import broadcast_product
from aero_compile.runtime.arithmetic.tolerances import DEFAULT, Form, cheapest
from aero_compile.runtime.lazy_jax import jnp

GOLDSCHMIDT = Form("two Goldschmidt iterations from a linear guess", 2e-4, 2645)
"""SPU's own."""

RECIPROCALS = (GOLDSCHMIDT, Form(f"{GOLDSCHMIDT.method}, and one of Newton's", 4e-5, 3090))
"""Forms of 1/x; errors are relative, for 2^-6 ≤ x ≤ 4."""

LEAST_SUM = 0.98
"""A row's largest entry is exp(0) = 1, less the errors of a chain of squares and of rounding."""

RECIPROCAL_ERROR = 6e-5
"""Largest relative error besides 2^-18 of the result's own rounding."""


MOST_IN_SMALL_RING = SMALL_RING_HOLDS / 8
"""Sums of rows of so many entries, and powers of two up to it, differ by an eighth of what the 32-bit ring holds."""


def reciprocal_of_sums(sums: Any, most: int) -> Any:
    """1/S for a JAX array of sums, `LEAST_SUM` ≤ S ≤ 1.02 · `most`."""
    powers = 2.0 ** np.arange(1, max(1, most - 1).bit_length())
    if not len(powers):
        return RECIPROCAL(sums)
    steps = powers.reshape((-1, *(1,) * sums.ndim))
    larger = at_least(sums, np.asarray(powers, np.float64), bounded=most <= MOST_IN_SMALL_RING)
    scale = 1.0 - jnp().where(larger, 1.0 / steps, 0.0).sum(axis=0)
    return multiply(RECIPROCAL(multiply(sums, scale)), scale)


def reciprocal(x: Any, tolerance: float = DEFAULT.reciprocal) -> Any:
    """1/x for a JAX array, relatively within `tolerance` for 2^-6 ≤ x ≤ 4, by the cheapest of `RECIPROCALS`.

    Raises:
        InputError: none is as close.
    """
    first = 1.0 / x
    if cheapest("reciprocal", RECIPROCALS, tolerance) is GOLDSCHMIDT:
        return first
    return first + multiply(first, 1.0 - multiply(x, first))


def quotient(x: Any, y: Any, tolerance: float = DEFAULT.reciprocal) -> Any:
    """x / y for a JAX array y, as close as `reciprocal`.

    Raises:
        InputError: no form is as close.
    """
    own = cheapest("reciprocal", RECIPROCALS, tolerance) is GOLDSCHMIDT
    # One reciprocal an element of the divisor: fewer than quotients when it broadcasts.
    broadcasts = math.prod(jnp().shape(y)) < math.prod(jnp().shape(x))
    if own and not broadcasts:
        return x / y
    inverse = reciprocal(y, tolerance)
    return x * inverse if is_public(x) else broadcast_product(x, inverse)
