"""Functions that fixed-point 2PC cannot compute exactly, and how far off each one is.

GELU, SiLU, sigmoid and tanh are evaluated as ``low`` left of -c, ``high`` right of c, and a Chebyshev
interpolant on [-c, c]. Each of them has a symmetric core (GELU and SiLU minus x/2 are even, sigmoid minus
1/2 and tanh are odd), so the interpolant is a polynomial in x^2, evaluated by products of Chebyshev
polynomials: these stay within [-1, 1], where powers of x would lose the fixed point's low bits. Cost per
element: two comparisons, two selections, degree + 1 products and one truncation for the weighted sum.

Coefficients are computed when first needed; ``approximations()`` reports the error of every function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Approximation:
    """How one function of the model is computed, and its worst error.

    ``formula_error``: largest |approximation - function| on ``domain`` in exact arithmetic, computed here
    (None for SPU's own algorithms, which are only measured).
    ``fixed_point_error``: a bound that the measured error in 2PC (64-bit ring, 18 fraction bits) stays
    under on ``domain``; the test suite measures it. ``relative`` says that both are relative errors.
    """

    name: str
    method: str
    domain: tuple[float, float]
    formula_error: float | None
    fixed_point_error: float
    relative: bool = False


@dataclass(frozen=True)
class _Piecewise:
    """A function with flat or linear tails: interpolated on [-limit, limit], its limit form outside."""

    name: str
    exact: Callable[[Array], Array]
    limit: float
    degree: int
    odd: bool  # odd core (sigmoid, tanh), else even core plus x/2 (gelu, silu)
    offset: float = 0.0  # what is left when the symmetric core is taken away

    def core(self, u: Array) -> Array:
        x = self.limit * np.sqrt(np.maximum(u, 1e-12))
        if self.odd:
            return np.asarray((self.exact(x) - self.offset) / (x / self.limit))
        return np.asarray(self.exact(x) - x / 2)


def _gelu(x: Array) -> Array:
    return np.asarray(x * 0.5 * np.vectorize(math.erfc)(-x / math.sqrt(2)))


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def _sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1 + np.tanh(x / 2)))


_PIECEWISE = {
    "gelu": _Piecewise("gelu", _gelu, limit=4.0, degree=8, odd=False),
    "gelu_tanh": _Piecewise("gelu_tanh", _gelu_tanh, limit=4.0, degree=8, odd=False),
    "silu": _Piecewise("silu", lambda x: x * _sigmoid(x), limit=10.0, degree=14, odd=False),
    "sigmoid": _Piecewise("sigmoid", _sigmoid, limit=8.0, degree=12, odd=True, offset=0.5),
    "tanh": _Piecewise("tanh", np.tanh, limit=4.5, degree=12, odd=True),
}


@cache
def _coefficients(name: str) -> Array:
    piece = _PIECEWISE[name]
    interpolate: Any = np.polynomial.chebyshev.chebinterpolate
    return np.asarray(interpolate(lambda t: piece.core((t + 1) / 2), piece.degree))


def piecewise(name: str, x: Any) -> Any:
    """Evaluate ``gelu``, ``gelu_tanh``, ``silu``, ``sigmoid`` or ``tanh`` on a JAX array of any shape."""
    import jax.numpy as jnp

    piece, coefficients = _PIECEWISE[name], _coefficients(name)
    scaled = x * (1.0 / piece.limit)
    square = scaled * scaled
    first = square + square - 1.0
    terms = [None, first]
    for k in range(2, piece.degree + 1):
        product = terms[k // 2] * terms[k - k // 2]
        terms.append(product + product - (1.0 if k % 2 == 0 else first))
    # One contraction with the public coefficients costs one truncation instead of one a term.
    core = jnp.stack(terms[1:], axis=-1) @ jnp.asarray(coefficients[1:], dtype=x.dtype) + coefficients[0]
    if piece.odd:
        middle, high, low = scaled * core + piece.offset, jnp.ones_like(x), 2 * piece.offset - 1
    else:
        middle, high, low = x * 0.5 + core, x, 0.0
    return jnp.where(x > piece.limit, high, jnp.where(x < -piece.limit, low, middle))


def _formula_error(piece: _Piecewise) -> float:
    x = np.linspace(-4 * piece.limit, 4 * piece.limit, 160_001)
    scaled = x / piece.limit
    evaluate: Any = np.polynomial.chebyshev.chebval
    core = evaluate(2 * scaled**2 - 1, _coefficients(piece.name))
    middle = scaled * core + piece.offset if piece.odd else x / 2 + core
    high = np.ones_like(x) if piece.odd else x
    low = np.full_like(x, 2 * piece.offset - 1) if piece.odd else np.zeros_like(x)
    value = np.where(scaled > 1, high, np.where(scaled < -1, low, middle))
    return float(np.abs(value - piece.exact(x)).max())


# Measured in Cheetah and SEMI2K with 64-bit rings and 18 fraction bits, rounded up; held by the tests.
_FIXED_POINT_ERRORS = {
    "gelu": 2e-4,
    "gelu_tanh": 2e-4,
    "silu": 6e-4,
    "sigmoid": 4e-4,
    "tanh": 4e-4,
    "exp": 2e-3,
    "softmax": 1e-3,
    "reciprocal": 2e-3,
    "rsqrt": 1e-3,
}

EXP_ITERATIONS = 7
"""Squarings in SPU's exp, which computes (1 + z/n)^n with n = 2^7."""

_EXP_N = 2.0**EXP_ITERATIONS

EXP_LOWEST = -1.8 * _EXP_N
"""Smallest argument for which ``exponential`` holds (towards -2n it returns to 1)."""


def exponential(x: Any) -> Any:
    """exp(x) for a JAX array, x between ``EXP_LOWEST`` and about 15.

    SPU computes (1 + z/n)^n, whose logarithm is z - z^2/2n + ...; feeding z = x + x^2/2n cancels the second
    term. One product more, and the error of a softmax falls by a factor of about 40.
    """
    import jax.numpy as jnp

    return jnp.exp(x + x * x * (0.5 / _EXP_N))


def _exp_error() -> float:
    x = np.linspace(EXP_LOWEST, 0, 400_001)
    return float(np.abs((1 + (x + x * x / (2 * _EXP_N)) / _EXP_N) ** _EXP_N - np.exp(x)).max())


def approximations() -> dict[str, Approximation]:
    """Return every approximated function with its method, domain and worst errors (64-bit ring, 18 bits).

    Anything not listed is exact up to fixed-point rounding: about 2^-18 a multiplication.
    """
    found = {
        name: Approximation(
            name,
            f"Chebyshev interpolant of degree {2 * piece.degree + piece.odd} on "
            f"[-{piece.limit:g}, {piece.limit:g}], tails outside",
            (-4 * piece.limit, 4 * piece.limit),
            _formula_error(piece),
            _FIXED_POINT_ERRORS[name],
        )
        for name, piece in _PIECEWISE.items()
    }
    rest = (
        Approximation(
            "exp",
            f"(1 + z/n)^n with z = x + x^2/2n and n = {_EXP_N:g}",
            (EXP_LOWEST, 0.0),
            _exp_error(),
            _FIXED_POINT_ERRORS["exp"],
        ),
        Approximation(
            "softmax",
            "exp(x - max) as above, times the Goldschmidt reciprocal of the row sum",
            (-16.0, 16.0),
            None,
            _FIXED_POINT_ERRORS["softmax"],
        ),
        Approximation(
            "reciprocal",
            "two Goldschmidt iterations from a linear guess",
            (2.0**-6, 2.0**8),
            None,
            _FIXED_POINT_ERRORS["reciprocal"],
            relative=True,
        ),
        Approximation(
            "rsqrt",
            "quartic on the mantissa",
            (2.0**-6, 2.0**8),
            None,
            _FIXED_POINT_ERRORS["rsqrt"],
            relative=True,
        ),
    )
    return found | {each.name: each for each in rest}
