"""Comparisons of secrets, in the 32-bit ring where an operator's values are known to fit (half of the bytes).

An operator compares by the functions here. Which operators may use the small ring is decided where a program is lowered
(`lowering/comparisons.py`); private checks of ranges, which must notice any number, compare by SPU's own operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt

from aero_compile.runtime.arithmetic.ring import fraction_bits, in_two_phases
from aero_compile.runtime.kernels.kernel import call_kernel
from aero_compile.runtime.kernels.negative import Negative
from aero_compile.runtime.kernels.prepared_sign import PreparedSign
from aero_compile.runtime.lazy_jax import jnp

COMPARISON_BYTES, SMALL_COMPARISON_BYTES, SELECT_BYTES = 82, 41, 16
"""Bytes an element, both ways, in Cheetah: in the 64-bit ring and in that of 32 bits; a selection in the former."""

SMALL_RING_HOLDS = 2.0**13
"""The 32-bit ring holds numbers of 18 fraction bits below this."""

_NONE, _BOUNDED, _ALL = range(3)
_SMALL: ContextVar[int] = ContextVar("small", default=_NONE)


@contextmanager
def small_ring(used: bool, shown: bool) -> Iterator[None]:
    """Within this context comparisons take the small ring.

    `used`: those whose values an operator bounds by itself; `shown`: all, because its arguments are known to fit.
    """
    token = _SMALL.set(_ALL if used and shown else _BOUNDED if used else _NONE)
    try:
        yield
    finally:
        _SMALL.reset(token)


def compares_small() -> bool:
    """Whether all comparisons take the small ring here."""
    return _SMALL.get() == _ALL


COARSE = 14
"""Fraction bits that a comparison looks at where it need not be exact: fewer bits are fewer ANDs offline."""


def below(x: Any, limit: Any, bounded: bool = False, coarse: bool = False) -> Any:
    """x < `limit` for a JAX array of floats and another or a number; bits of the shape that they broadcast to.

    `bounded`: whatever the operator's arguments are, |x - limit| is far below `SMALL_RING_HOLDS`. `coarse`: bits may be
    wrong where x is within 2^-`COARSE` of the limit.
    """
    small = _SMALL.get() >= (_BOUNDED if bounded else _ALL)
    if in_two_phases():
        (bits,) = call_kernel(_sign(small, coarse, (0.0,)), x - limit)
        return bits[0]
    if small:
        (bit,) = call_kernel(Negative(), x - limit)
        return bit
    return x < limit


def at_least(x: Any, limits: npt.NDArray[np.float64], bounded: bool = False) -> Any:
    """Compare a JAX array of floats with several public limits: bits [limits, …] of x ≥ limit, coarse ones.

    `bounded`: as for `below`. In two phases the limits together cost little more than one of them.
    """
    if in_two_phases():
        small = _SMALL.get() >= (_BOUNDED if bounded else _ALL)
        (found,) = call_kernel(_sign(small, True, tuple(map(float, limits))), x)
        return jnp().logical_not(found)
    columns = limits.reshape((-1, *(1,) * x.ndim))
    return above(jnp().broadcast_to(x, (len(columns), *x.shape)), columns, bounded)


def _sign(small: bool, coarse: bool, limits: tuple[float, ...]) -> PreparedSign:
    """The kernel in the narrowest ring that holds what is compared."""
    bits = fraction_bits()
    assert bits is not None
    dropped = max(0, bits - COARSE) if coarse else 0
    whole = SMALL_RING_HOLDS if small else 2.0 ** (63 - 2 * bits)  # results of operators are below a fourth of it
    return PreparedSign(bits - dropped + int(math.log2(whole)) + 1, dropped, bits, limits)


def above(x: Any, limit: Any, bounded: bool = False) -> Any:
    """x > `limit`, as `below`."""
    return below(limit, x, bounded) if _by_kernel() else x > limit


def maximum(x: Any, y: Any) -> Any:
    """The larger of two JAX arrays of floats, or of one and a number."""
    return jnp().where(below(x, y), y, x) if _by_kernel() else jnp().maximum(x, y)


def minimum(x: Any, y: Any) -> Any:
    """The smaller of two, as `maximum`."""
    return jnp().where(below(x, y), x, y) if _by_kernel() else jnp().minimum(x, y)


def _by_kernel() -> bool:
    """True if a comparison may be a call of a kernel here, which takes a difference."""
    return _SMALL.get() != _NONE or in_two_phases()


def magnitude(x: Any) -> Any:
    """|x| for a JAX array of floats."""
    return jnp().where(below(x, 0.0), -x, x)
