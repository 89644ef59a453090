"""Activations and other functions that fixed-point 2PC cannot compute exactly, with their errors.

Every activation follows its limits at both ends; what is left of them is an f that vanishes at infinity:

    gelu(x), silu(x), softplus(x) = relu(x) − f(|x|)
    mish(x) = relu(x) − f(|x|), another f on each side
    sigmoid(x), tanh(x) = 1 − f(|x|) for x > 0, low + f(|x|) for x < 0
    elu(x) = x for x > 0, f(|x|) − 1 for x < 0

On [0, limit] f is a chain of squares (`arithmetic/squares.py`), fitted by `benchmarks/fit_squares.py`; beyond, 0. Two f
are two sums of one chain. Cost per element: two comparisons (the sign, and |x| against the limit), two or three
selections, the squares, and a truncation for each weighted sum. An activation is a row of `_FUNCTIONS` and the weights
of its chains; SELU, CELU, logsigmoid and others with parameters are made of these in `operators/pointwise.py`.

`approximations()` reports the error of every function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aero_compile.errors import InputError
from aero_compile.runtime.arithmetic.coefficients import ACTIVATIONS
from aero_compile.runtime.arithmetic.comparison import COMPARISON_BYTES, SELECT_BYTES, above, at_least
from aero_compile.runtime.arithmetic.elementary import INVERSE_ROOTS, LOGARITHMS, RECIPROCALS, ROOTS
from aero_compile.runtime.arithmetic.exponential import Power, cheapest_exponential, choose_power
from aero_compile.runtime.arithmetic.public_factors import scale
from aero_compile.runtime.arithmetic.ring import in_two_phases
from aero_compile.runtime.tolerances import DEFAULT, Form, Tolerances, cheapest

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Approximation:
    """How one function of the model is computed, what it costs, and its worst error.

    `formula_error`: largest |approximation - function| on `domain` in exact arithmetic, computed here
    (None for SPU's own algorithms, which are only measured).
    `fixed_point_error`: a bound that the measured error in 2PC (64-bit ring, 18 fraction bits) stays
    under on `domain`; the test suite measures it. `relative` says that both are relative errors.
    `bytes_per_element`: measured in Cheetah with the same settings, both ways.
    """

    name: str
    method: str
    domain: tuple[float, float]
    formula_error: float | None
    fixed_point_error: float
    bytes_per_element: int
    relative: bool = False


@dataclass(frozen=True)
class _Function:
    """A function given by f(t) on t = |x|, which vanishes at infinity.

    `low` None: relu(x) − f, where f is another one for x < 0 if `sides` is 2. Otherwise the limits are `low` and 1,
    approached as low + f and 1 − f; but x itself for x > 0 if `straight`.
    """

    exact: Callable[[Array], Array]
    low: float | None = None
    sides: int = 1
    straight: bool = False

    @property
    def selections(self) -> int:
        """Choices between secrets, each a product with a bit."""
        return 1 + self.sides if self.low is None else 3


def _gelu(x: Array) -> Array:
    return np.asarray(x * 0.5 * np.vectorize(math.erfc)(-x / math.sqrt(2)))


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def _sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1 + np.tanh(x / 2)))


def _softplus(x: Array) -> Array:
    return np.asarray(np.logaddexp(x, 0.0))


_FUNCTIONS = {
    "gelu": _Function(_gelu),
    "gelu_tanh": _Function(_gelu_tanh),
    "silu": _Function(lambda x: x * _sigmoid(x)),
    "softplus": _Function(_softplus),
    "mish": _Function(lambda x: x * np.tanh(_softplus(x)), sides=2),
    "sigmoid": _Function(_sigmoid, low=0.0),
    "tanh": _Function(np.tanh, low=-1.0),
    "elu": _Function(lambda x: np.maximum(x, 0.0) + np.expm1(np.minimum(x, 0.0)), low=-1.0, straight=True),
}


def activation(name: str, x: Any, tolerance: float = DEFAULT.activation, rate: float = 1.0) -> Any:
    """Evaluate one of `ACTIVATION_NAMES` on a JAX array of any shape.

    The cheapest form is taken that errs by `tolerance` at most, in Cheetah (64-bit ring, 18 fraction bits). `rate`: of
    what follows ReLU, f(rate·x)/rate instead of f(x), and 1/rate times its error.

    Raises:
        InputError: there is no form as close.
    """
    import jax.numpy as jnp

    if _FUNCTIONS[name].straight:
        return exponential_unit(x, tolerance=tolerance)
    low = _FUNCTIONS[name].low
    positive, rectified, left = _parts(name, x, tolerance, rate)
    if low is None:
        return rectified - scale(left, 1.0 / rate)
    return low + left + jnp.where(positive, 1.0 - low - left - left, 0.0)  # selecting from two secrets is a product


def exponential_unit(x: Any, alpha: float = 1.0, rate: float = 1.0, tolerance: float = DEFAULT.activation) -> Any:
    """x for x > 0, alpha·(exp(rate·x) − 1) below, of a JAX array; it errs by |alpha| times the tolerance at most."""
    import jax.numpy as jnp

    positive, rectified, left = _parts("elu", x, tolerance, rate)
    below = left - 1.0
    # Both choices by one bit are of a value or 0: else the compiler prepares the bit, which parties do not run.
    return rectified + scale(below + jnp.where(positive, -below, 0.0), alpha)


def _parts(name: str, x: Any, tolerance: float, rate: float) -> tuple[Any, Any, Any]:
    """x > 0, relu(x), and f(rate·|x|)."""
    import jax.numpy as jnp

    limit, chain = ACTIVATIONS[name, squares_for(name, tolerance)]
    if in_two_phases():  # with both ends at once, which exclude each other: XOR needs no message
        bits = at_least(x, np.array([0.0, limit / rate, -limit / rate]))
        positive, outside = bits[0], jnp.logical_xor(bits[1], jnp.logical_not(bits[2]))
    else:
        positive, outside = above(x, 0.0), None
    rectified = jnp.where(positive, x, 0.0)  # relu(x) and |x| from one bit
    size = scale(rectified + rectified - x, rate)
    left, *right = chain.outputs(size)
    if right:  # before the limit is looked at: one choice by its bit
        left = left + jnp.where(positive, right[0] - left, 0.0)
    return positive, rectified, jnp.where(above(size, limit) if outside is None else outside, 0.0, left)


def squares_for(name: str, tolerance: float) -> int:
    """Return the number of squares with which an activation is computed.

    Raises:
        InputError: with none does it err by `tolerance` or less.
    """
    errors = {squares: error for (known, squares), error in _ACTIVATION_ERRORS.items() if known == name}
    good = [squares for squares, error in errors.items() if error <= tolerance]
    if not good:
        raise InputError(f"no {name} errs by {tolerance:g} or less: {min(errors.values()):g} is the least")
    return min(good)


def left_over(name: str, t: Array) -> tuple[Array, ...]:
    """Return each f(t) for t ≥ 0: what is left of relu(x), or of a limit, at distance t from 0 (float64)."""
    function = _FUNCTIONS[name]
    if function.low is not None:
        return (np.asarray(function.exact(-t) - function.low if function.straight else 1.0 - function.exact(t)),)
    sides = (-function.exact(-t), t - function.exact(t))
    return tuple(map(np.asarray, sides[-function.sides :]))


def _formula_error(name: str, squares: int) -> float:
    """Largest error of an activation in exact arithmetic, tails included."""
    limit, chain = ACTIVATIONS[name, squares]
    size = np.linspace(0, 4 * limit, 40_001)
    found = [np.where(size > limit, 0.0, each) for each in chain.exact_outputs(np.minimum(size, limit))]
    # Of both sides where f is the same: one is as far off as the other.
    return float(max(np.abs(left - exact).max() for left, exact in zip(found, left_over(name, size), strict=True)))


# Measured in Cheetah and SEMI2K with 64-bit rings and 18 fraction bits, rounded up; held by the tests.
_ACTIVATION_ERRORS = {
    ("gelu", 2): 2.2e-3,
    ("gelu", 3): 3e-4,
    ("gelu", 4): 6e-5,
    ("gelu_tanh", 2): 2.2e-3,
    ("gelu_tanh", 3): 2e-4,
    ("silu", 3): 2e-3,
    ("silu", 4): 2e-4,
    ("sigmoid", 3): 3e-4,
    ("sigmoid", 4): 2e-4,
    ("tanh", 3): 5e-4,
    ("tanh", 4): 2e-4,
    ("softplus", 3): 6e-4,
    ("softplus", 4): 1e-4,
    ("elu", 3): 6e-4,
    ("elu", 4): 1e-4,
    ("mish", 5): 7e-4,
    ("mish", 6): 1.5e-4,
}
ACTIVATION_NAMES = tuple(_FUNCTIONS)
"""Activations that are approximated."""

_ROOT_DOMAIN = (2.0**-6, 2.0**8)


def approximations(tolerances: Tolerances = DEFAULT) -> dict[str, Approximation]:
    """Return every approximated function as it is computed under `tolerances`: method, domain, errors and cost.

    Anything not listed is exact up to fixed-point rounding: about 2^-18 a multiplication.

    Raises:
        InputError: no form of some function is as close as is asked for.
    """
    found = [_activation(name, squares_for(name, tolerances.activation)) for name in _FUNCTIONS]
    found += [_exp(choose_power(tolerances.exp)), _softmax(tolerances.softmax)]
    found.append(_of("reciprocal", cheapest("reciprocal", RECIPROCALS, tolerances.reciprocal), (2.0**-6, 4.0)))
    found.append(_of("rsqrt", cheapest("inverse root", INVERSE_ROOTS, tolerances.root)))
    found.append(_of("sqrt", cheapest("root", ROOTS, tolerances.root)))
    found.append(_of("log", cheapest("log", LOGARITHMS, tolerances.log), relative=False))
    return {each.name: each for each in found}


def _of(name: str, form: Form, domain: tuple[float, float] = _ROOT_DOMAIN, relative: bool = True) -> Approximation:
    return Approximation(name, form.method, domain, None, form.error, form.bytes_per_element, relative)


def _exp(power: Power) -> Approximation:
    x = np.linspace(power.lowest, 0, 400_001)
    z = x / power.n
    error = float(np.abs((1 + z + z * z / 2) ** power.n - np.exp(x)).max())
    method = f"(1 + z + z²/2)^{power.n} with z = x/{power.n}"
    return Approximation("exp", method, (power.lowest, 0.0), error, power.error, power.bytes_per_element)


def _softmax(tolerance: float | None) -> Approximation:
    """For scores of which nothing is known, in rows of up to 128."""
    chosen = cheapest_exponential(math.inf, tolerance, entries=128)
    method = f"{chosen.form}, on [-{chosen.reach:.3g}, 0], 0 below, times the reciprocal of the row sum"
    return Approximation("softmax", method, (-16.0, 16.0), None, chosen.error_in(128), chosen.bytes_per_element)


def _activation(name: str, squares: int) -> Approximation:
    limit, chain = ACTIVATIONS[name, squares]
    selections = _FUNCTIONS[name].selections
    return Approximation(
        name,
        f"chain of {squares} squares on [-{limit:g}, {limit:g}], limits outside",
        (-4 * limit, 4 * limit),
        _formula_error(name, squares),
        _ACTIVATION_ERRORS[name, squares],
        2 * COMPARISON_BYTES + selections * SELECT_BYTES + chain.bytes_per_element,
    )
