"""1/S for the sums S of a softmax, which lie between 1 and the number of a row's entries.

Where that is known, SPU's reciprocal does too much: it looks for the highest of 64 bits. Here S is compared with the
powers of two up to the number of entries, all at once; the bits add up to a scale 2^-j that brings S to [1, 2), where
a chain of squares is 1/x.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aero_compile.runtime.arithmetic.coefficients import RECIPROCAL
from aero_compile.runtime.arithmetic.filling import multiply
from aero_compile.runtime.lazy_jax import jnp

LEAST_SUM = 0.98
"""A row's largest entry is exp(0) = 1, less the errors of a chain of squares and of rounding."""

RECIPROCAL_ERROR = 6e-5
"""Largest relative error besides 2^-18 of the result's own rounding."""


def reciprocal_of_sums(sums: Any, most: int) -> Any:
    """1/S for a JAX array of sums, ``LEAST_SUM`` ≤ S ≤ 1.02 · ``most``."""
    powers = 2.0 ** np.arange(1, max(1, most - 1).bit_length())
    if not len(powers):
        return RECIPROCAL(sums)
    steps = powers.reshape((-1, *(1,) * sums.ndim))
    above = jnp().broadcast_to(sums, (len(powers), *sums.shape)) > steps
    scale = 1.0 - jnp().where(above, 1.0 / steps, 0.0).sum(axis=0)
    return multiply(RECIPROCAL(multiply(sums, scale)), scale)
