"""What an element-wise piece of arithmetic computes, found by running it on a grid of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from aero_compile.ir.ops import VIEWS, of_form
from aero_compile.model import TransformedModel

aten = torch.ops.aten

TOLERANCE = 1e-7
"""Largest difference, relative to max(1, |y|), at which a region counts as the op."""

LEAST_SLOPE = 1e-6
"""Of a leaky ReLU; `max(x, 1e-30)`, which guards a division, is none with a slope of −2.5e-31."""

Function = Callable[[Tensor], Tensor]

_ACTIVATIONS: Mapping[tuple[Any, ...], Function] = {
    ("gelu", "none"): F.gelu,
    ("gelu", "tanh"): lambda x: F.gelu(x, approximate="tanh"),
    ("silu",): F.silu,
    ("relu",): F.relu,
    ("tanh",): torch.tanh,
    ("sigmoid",): torch.sigmoid,
    ("mish",): F.mish,
    ("hardswish",): F.hardswish,
    ("squared_relu",): lambda x: F.relu(x).square(),
    ("selu",): F.selu,
    ("log_sigmoid",): F.logsigmoid,
}

_FILLED = {
    **dict.fromkeys((aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default), 0.0),
    **dict.fromkeys((aten.ones_like.default, aten.ones.default, aten.new_ones.default), 1.0),
}
_FILLS = {
    aten.full_like.default: 1,
    aten.full.default: 1,
    aten.new_full.default: 2,
    aten.scalar_tensor.default: 0,
}
"""Op → which argument every element of its result has."""

_PASSED = VIEWS | of_form("cast", "cast_as", "expand_as", "detach")


def agree(value: Any, reference: Tensor) -> bool:
    """Whether `value` is finite and within `TOLERANCE` of `reference`."""
    if not isinstance(value, Tensor) or value.shape != reference.shape:
        return False
    error = (value - reference).abs() / reference.abs().clamp_min(1.0)
    return bool(torch.isfinite(value).all()) and float(error.max()) < TOLERANCE


def uniform_value(model: TransformedModel, node: fx.Node) -> float | None:
    """The number that every element of a constant has, or None: of a fill, or of a buffer with one element."""
    while node.op == "call_function" and node.target in _PASSED and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if node.op == "get_attr":
        parent, _, leaf = str(node.target).rpartition(".")
        buffer = model.get_submodule(parent)._buffers.get(leaf)
        known = buffer is not None and buffer.device.type != "meta" and buffer.numel() == 1
        return float(buffer) if known and buffer is not None else None
    if node.target in _FILLED:
        return _FILLED[node.target]
    given = node.args[_FILLS[node.target]] if node.target in _FILLS else None
    return float(given) if isinstance(given, int | float) else None


@dataclass(frozen=True)
class Classified:
    """`factor` times an op of one number: the op's name, or `squared_relu`, and its options."""

    name: str
    options: tuple[Any, ...]
    factor: float


def classify(run: Function, literals: Iterable[float]) -> Classified | None:
    """The op that computes what `run` computes up to a factor; None if none of them does.

    Args:
        run: maps float64 numbers to numbers of the same shape, one by one.
        literals: numbers in the arithmetic. A function of pieces changes at them, so they are tried as well.
    """
    near, far = _grids(literals)
    value = run(near)
    if not isinstance(value, Tensor) or value.shape != near.shape or not value.is_floating_point():
        return None
    for (name, *options), function in _candidates(near, value):
        factor = _factor(near, value, function)
        if factor is None or (name in ("relu", "squared_relu") and bool((value[near < 0] != 0).any())):
            continue  # max(x, 1e-12) guards a division: its zero would be no zero
        if agree(value / factor, function(near)):
            wide, expected = run(far) / factor, function(far)
            finite = torch.isfinite(wide)  # exponentials overflow where their quotients do not
            if agree(wide[finite], expected[finite]):
                return Classified(name, tuple(options), factor)
    return None


def _factor(x: Tensor, y: Tensor, function: Function) -> float | None:
    """What `function` has to be multiplied by to give `y` at x = 4; None if nothing does."""
    quotient = float((y / function(x))[x == 4.0][0])
    if not math.isfinite(quotient) or quotient == 0.0:
        return None
    return 1.0 if abs(quotient - 1.0) < TOLERANCE else float(f"{quotient:.12g}")


def _grids(literals: Iterable[float]) -> tuple[Tensor, Tensor]:
    """Numbers where an activation differs from what only resembles it: moderate ones, and large ones."""
    small = torch.logspace(-9, 1.7, 215, dtype=torch.float64)
    large = torch.logspace(1.7, 6, 44, dtype=torch.float64)
    special = torch.tensor([x for x in literals if 0 < abs(x) < 1e6], dtype=torch.float64)
    special = torch.cat([special, -special])
    around = torch.cat([special * factor for factor in (0.999, 1.0, 1.001)])
    plain = [torch.linspace(-60, 60, 961), torch.linspace(-4, 4, 513)]
    near = torch.cat([*plain, small, -small, around[around.abs() <= 60]]).double()
    return near, torch.cat([large, -large, around[around.abs() > 60]])


def _candidates(x: Tensor, y: Tensor) -> Iterable[tuple[tuple[Any, ...], Function]]:
    yield from _ACTIVATIONS.items()
    at = {place: float(y[x == place][0]) for place in (-4.0, -2.0, -1.0, 0.0, 4.0)}
    slope = _written(-at[-4.0] / at[4.0]) if at[4.0] else 0.0
    if LEAST_SLOPE < abs(slope) < 1.0:
        yield ("leaky_relu", slope), lambda v: F.leaky_relu(v, slope)
    sharpness = _written(math.log(2) / at[0.0]) if at[0.0] > LEAST_BEND else 0.0
    if sharpness > 0:
        yield ("softplus", sharpness, 20.0), lambda v: F.softplus(v, sharpness)
    yield from _exponential_units(at)
    low, high = (end if abs(end) < 60 else None for end in (float(y.min()), float(y.max())))
    if (low is None or low < -LEAST_BEND) and (high is None or high > LEAST_BEND) and (low, high) != (None, None):
        yield ("clamp", low, high), lambda v: torch.clamp(v, low, high)


LEAST_BEND = 1e-3
"""How far from ReLU an activation with parameters is at least: max(x, 1e-9) guards a division, and is no softplus."""


def _exponential_units(at: Mapping[float, float]) -> Iterable[tuple[tuple[Any, ...], Function]]:
    """ELU, CELU and all of their kind, s·x for x > 0 and s·α·(exp(r·x) − 1) below, by the values at some places."""
    first, second = at[-1.0], at[-2.0]
    step = second / first - 1 if first < -LEAST_BEND else 0.0  # exp(−r)
    scale = _written(at[4.0] / 4.0)
    if not (0 < step < 1 and scale > 0):
        return
    rate, alpha = _written(-math.log(step)), _written(first / (step - 1) / scale)
    if scale == 1.0 and abs(rate * alpha - 1) < 1e-9 and rate != 1.0:
        yield ("celu", alpha), lambda v: F.celu(v, alpha)
    options = (alpha,) if scale == rate == 1.0 else (alpha, scale, rate)
    yield ("elu", *options), lambda v: aten.elu.default(v, *options)


def _written(number: float) -> float:
    """The number that was written, from one that roundings went into; 0 if that is none."""
    return float(f"{number:.12g}") if math.isfinite(number) else 0.0
