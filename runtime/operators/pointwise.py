"""Live operators that work element by element (activations, arithmetic), and reductions."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from aero_compile.runtime.arithmetic.comparison import above, below, magnitude, maximum, minimum
from aero_compile.runtime.arithmetic.element_products import multiply_whole
from aero_compile.runtime.arithmetic.elementary import inverse_root, logarithm, quotient, reciprocal, root
from aero_compile.runtime.arithmetic.exponential import choose_power
from aero_compile.runtime.arithmetic.public_factors import is_public, mean, scale, times
from aero_compile.runtime.arithmetic.squares import square
from aero_compile.runtime.lazy_jax import jnp
from aero_compile.runtime.operators.activations import activation, exponential_unit
from aero_compile.runtime.operators.declaration import operator, watch
from aero_compile.runtime.tolerances import DEFAULT, Tolerances


@operator("gelu")
def _gelu(x: Any, approximate: str = "none", exact: bool = False, tolerances: Tolerances = DEFAULT, **_: Any) -> Any:
    import jax

    if exact:
        return jax.nn.gelu(x, approximate=approximate == "tanh")
    return activation("gelu_tanh" if approximate == "tanh" else "gelu", x, tolerances.activation)


@operator("silu")
def _silu(x: Any, exact: bool = False, tolerances: Tolerances = DEFAULT, **_: Any) -> Any:
    import jax

    return jax.nn.silu(x) if exact else activation("silu", x, tolerances.activation)


@operator("sigmoid")
def _sigmoid(x: Any, exact: bool = False, tolerances: Tolerances = DEFAULT, **_: Any) -> Any:
    import jax

    return jax.nn.sigmoid(x) if exact else activation("sigmoid", x, tolerances.activation)


@operator("tanh")
def _tanh(x: Any, exact: bool = False, tolerances: Tolerances = DEFAULT, **_: Any) -> Any:
    return jnp().tanh(x) if exact else activation("tanh", x, tolerances.activation)


@operator("mish")
def _mish(x: Any, exact: bool = False, tolerances: Tolerances = DEFAULT, **_: Any) -> Any:
    import jax

    return jax.nn.mish(x) if exact else activation("mish", x, tolerances.activation)


@operator("softplus")
def _softplus(
    x: Any, beta: float = 1, threshold: float = 20, exact: bool = False, tolerances: Tolerances = DEFAULT, **_: Any
) -> Any:
    import jax

    if beta <= 0:
        raise NotImplementedError(f"a softplus with beta={beta}")
    watch("argument", x)
    found = jax.nn.softplus(x * beta) / beta if exact else activation("softplus", x, tolerances.activation, beta)
    return found if threshold > SMOOTH_THRESHOLD else jnp().where(above(x, threshold / beta), x, found)


SMOOTH_THRESHOLD = 14.0
"""From here on a softplus takes no step where it becomes x that 18 fraction bits show: log(1 + exp(−14)) = 8e-7."""


@operator("log_sigmoid")
def _log_sigmoid(x: Any, exact: bool = False, tolerances: Tolerances = DEFAULT, **_: Any) -> Any:
    return -_softplus(-x, exact=exact, tolerances=tolerances)


@operator("elu")
def _elu(
    x: Any,
    alpha: float = 1,
    scale: float = 1,
    input_scale: float = 1,
    exact: bool = False,
    tolerances: Tolerances = DEFAULT,
    **_: Any,
) -> Any:
    if input_scale <= 0:
        raise NotImplementedError(f"an ELU or CELU whose exponential grows for x < 0 (by {-input_scale:g}·x)")
    watch("argument", x)
    if exact:
        return times(jnp().where(x > 0, x, alpha * jnp().expm1(jnp().minimum(x, 0.0) * input_scale)), scale)
    return times(exponential_unit(x, alpha, input_scale, tolerances.activation), scale)


@operator("celu")
def _celu(x: Any, alpha: float = 1, exact: bool = False, tolerances: Tolerances = DEFAULT, **_: Any) -> Any:
    return _elu(x, alpha, 1, 1 / alpha, exact, tolerances)


@operator("selu")
def _selu(x: Any, exact: bool = False, tolerances: Tolerances = DEFAULT, **_: Any) -> Any:
    return _elu(x, SELU_ALPHA, SELU_SCALE, 1, exact, tolerances)


SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
"""Of self-normalizing networks (Klambauer et al. 2017)."""


@operator("relu")
def _relu(x: Any, **_: Any) -> Any:
    return maximum(x, 0.0)


@operator("leaky_relu")
def _leaky_relu(x: Any, negative_slope: Any = 0.01, **_: Any) -> Any:
    return jnp().where(above(x, 0.0), x, times(x, negative_slope))


@operator("hardswish")
def _hardswish(x: Any, **_: Any) -> Any:
    return multiply_whole(x, minimum(maximum(x * (1 / 6) + 0.5, 0.0), 1.0))


@operator("hardsigmoid")
def _hardsigmoid(x: Any, **_: Any) -> Any:
    return minimum(maximum(scale(x, 1 / 6) + 0.5, 0.0), 1.0)


@operator("softshrink")
def _softshrink(x: Any, lambd: float = 0.5, **_: Any) -> Any:
    return x - minimum(maximum(x, -lambd), lambd)


@operator("hardshrink")
def _hardshrink(x: Any, lambd: float = 0.5, **_: Any) -> Any:
    return jnp().where(above(magnitude(x), lambd), x, 0.0)


@operator("prelu")
def _prelu(x: Any, weight: Any, **_: Any) -> Any:
    shape = [1] * x.ndim
    if weight.size > 1:
        shape[1] = weight.size
    return jnp().where(above(x, 0.0), x, x * weight.reshape(shape))


@operator("add")
def _add(x: Any, other: Any, alpha: Any = 1, **_: Any) -> Any:
    return x + times(other, alpha)


@operator("sub")
def _sub(x: Any, other: Any, alpha: Any = 1, **_: Any) -> Any:
    return x - times(other, alpha)


@operator("rsub")
def _rsub(x: Any, other: Any, alpha: Any = 1, **_: Any) -> Any:
    return other - times(x, alpha)


@operator("mul")
def _mul(x: Any, other: Any, owned: Collection[str] = (), given: Collection[str] = (), **_: Any) -> Any:
    if given:
        return x * other
    if x is other:
        return square(x)
    if "x" in owned:
        x, other = other, x
    floats = [each for each in (x, other) if not is_public(each) and jnp().issubdtype(each.dtype, jnp().floating)]
    return times(x, other, bool(owned)) if len(floats) + is_public(x) + is_public(other) == 2 else x * other


@operator("div")
def _div(x: Any, other: Any, rounding_mode: str | None = None, tolerances: Tolerances = DEFAULT, **_: Any) -> Any:
    if rounding_mode is not None:
        raise NotImplementedError(f"division rounded by {rounding_mode!r}")
    if not is_public(other):
        watch("divisor", jnp().abs(other))
        return _over(x, other, tolerances.reciprocal) if is_public(x) else quotient(x, other, tolerances.reciprocal)
    if not np.all(other):
        raise NotImplementedError("a division by zero")
    return times(x, 1.0 / np.asarray(other, np.float64))  # a product with a public number, not a division


def _over(numerator: Any, x: Any, tolerance: float) -> Any:
    """A public number over a secret; a small one is 1 times itself, a large one goes in before digits are lost."""
    large = np.abs(numerator) >= 1
    found = quotient(np.where(large, numerator, 1.0).astype(np.float32), x, tolerance)
    return scale(found, np.where(large, 1.0, numerator))


@operator("reciprocal")
def _reciprocal(x: Any, tolerances: Tolerances = DEFAULT, **_: Any) -> Any:
    watch("divisor", jnp().abs(x))
    return reciprocal(x, tolerances.reciprocal)


@operator("neg")
def _neg(x: Any, **_: Any) -> Any:
    return -x


@operator("abs")
def _abs(x: Any, **_: Any) -> Any:
    return magnitude(x)


@operator("square")
def _square(x: Any, **_: Any) -> Any:
    return square(x)


@operator("pow")
def _pow(x: Any, exponent: Any, tolerances: Tolerances = DEFAULT, **_: Any) -> Any:
    if not isinstance(exponent, (int, float)):
        raise NotImplementedError("a power with a tensor exponent")
    if float(exponent).is_integer() and 1 <= exponent <= 64:
        result, factor, left = None, x, int(exponent)
        while left:
            result = factor if left & 1 and result is None else multiply_whole(result, factor) if left & 1 else result
            factor, left = (square(factor) if left > 1 else factor), left >> 1
        return result
    if exponent in (0.5, -0.5):
        watch("argument", x)
        return (root if exponent > 0 else inverse_root)(x, tolerances.root)
    if exponent in (-1, -2):
        watch("base", jnp().abs(x))
        return reciprocal(x if exponent == -1 else square(x), tolerances.reciprocal)
    raise NotImplementedError(f"the power {exponent}")


@operator("sqrt")
def _sqrt(x: Any, tolerances: Tolerances = DEFAULT, **_: Any) -> Any:
    watch("argument", x)
    return root(x, tolerances.root)


@operator("rsqrt")
def _rsqrt(x: Any, tolerances: Tolerances = DEFAULT, **_: Any) -> Any:
    watch("argument", x)
    return inverse_root(x, tolerances.root)


@operator("exp")
def _exp(x: Any, exact: bool = False, tolerances: Tolerances = DEFAULT, **_: Any) -> Any:
    watch("argument", x)
    return jnp().exp(x) if exact else choose_power(tolerances.exp)(x)


@operator("expm1")
def _expm1(x: Any, exact: bool = False, tolerances: Tolerances = DEFAULT, **_: Any) -> Any:
    return _exp(x, exact, tolerances) - 1.0


@operator("exp2")
def _exp2(x: Any, exact: bool = False, tolerances: Tolerances = DEFAULT, **_: Any) -> Any:
    watch("argument", x)
    return jnp().exp2(x) if exact else choose_power(tolerances.exp)(scale(x, math.log(2)))


@operator("log1p")
def _log1p(x: Any, tolerances: Tolerances = DEFAULT, **_: Any) -> Any:
    watch("argument", x)
    return logarithm(x + 1.0, tolerances.log)


@operator("log")
def _log(x: Any, tolerances: Tolerances = DEFAULT, **_: Any) -> Any:
    watch("argument", x)
    return logarithm(x, tolerances.log)


@operator("maximum")
def _maximum(x: Any, other: Any, **_: Any) -> Any:
    return maximum(x, other)


@operator("minimum")
def _minimum(x: Any, other: Any, **_: Any) -> Any:
    return minimum(x, other)


@operator("clamp", "clamp_min", "clamp_max")
def _clamp(x: Any, min: Any = None, max: Any = None, **_: Any) -> Any:
    x = x if min is None else maximum(x, min)
    return x if max is None else minimum(x, max)


@operator("hardtanh")
def _hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0, **_: Any) -> Any:
    return _clamp(x, min_val, max_val)


@operator("masked_fill")
def _masked_fill(x: Any, mask: Any, value: Any, **_: Any) -> Any:
    return jnp().where(mask, value, x)


@operator("where")
def _where(condition: Any, x: Any = None, other: Any = None, **_: Any) -> Any:
    return jnp().where(condition, x, other)


def _axes(dim: Any) -> Any:
    return tuple(dim) if isinstance(dim, (list, tuple)) and dim else dim if isinstance(dim, int) else None


@operator("sum")
def _sum(x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    return x.sum(axis=_axes(dim), keepdims=keepdim)


@operator("mean")
def _mean(x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
    return mean(x, _axes(dim), keepdim)


@operator("amax")
def _amax(x: Any, dim: Any = (), keepdim: bool = False, **_: Any) -> Any:
    return x.max(axis=_axes(dim), keepdims=keepdim)


@operator("amin")
def _amin(x: Any, dim: Any = (), keepdim: bool = False, **_: Any) -> Any:
    return x.min(axis=_axes(dim), keepdims=keepdim)


@operator("gt")
def _gt(x: Any, other: Any, **_: Any) -> Any:
    return above(x, other)


@operator("lt")
def _lt(x: Any, other: Any, **_: Any) -> Any:
    return below(x, other)


@operator("ge")
def _ge(x: Any, other: Any, **_: Any) -> Any:
    return x >= other


@operator("le")
def _le(x: Any, other: Any, **_: Any) -> Any:
    return x <= other
