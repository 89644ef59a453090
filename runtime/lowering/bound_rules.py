"""How each operator's result is bounded by its operands: one rule for every live operator.

A rule sees the operator's arguments by the names of the ATen schema and asks `Values` for their bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from aero_compile.runtime.arithmetic.exponential import choose_power
from aero_compile.runtime.lowering import product_bounds as products
from aero_compile.runtime.operators import bounds
from aero_compile.runtime.operators.bounds import SLACK, Bound, Rule, Values, times
from aero_compile.runtime.operators.pointwise import SELU_ALPHA, SELU_SCALE
from aero_compile.runtime.partition.partition import op_name

# --- sums and choices -----------------------------------------------------------------------------------


def _sum_of_two(first: str, second: str, sign: float) -> Rule:
    def rule(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
        shape, alpha = values.shape(node), float(given.get("alpha", 1)) * sign
        left, right = (bounds.spread(values, given[name], shape) for name in (first, second))
        found = bounds.plus(left, right, alpha)
        if found.peak > values.form.sum_limit:
            for name in (first, second):
                values.need(given[name], values.form.limit)
        return found

    return rule


def _chosen(*names: str) -> Rule:
    def rule(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
        shape = values.shape(node)
        return bounds.hull(
            *(bounds.spread(values, given[name], shape) for name in names if given.get(name) is not None)
        )

    return rule


def _same(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    return values.of(given.get("x", given.get("input")))


def _negative(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    return values.of(given["x"]).scaled(-1.0, -1.0)


def _absolute(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    found = values.of(given["x"])
    return replace(found, low=0.0, high=found.peak)


def _bits(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    return Bound(0.0, 1.0)


def _clamp(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    found = values.of(given["x"])
    low, high = given.get("min", given.get("min_val")), given.get("max", given.get("max_val"))
    least = found.low if low is None else max(found.low, values.of(low).low)
    most = found.high if high is None else min(max(found.high, least), values.of(high).high)
    return Bound(min(least, most), most)


def _reduced(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    found = values.of(given["x"])
    return Bound(found.low, found.high)


def _total(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    found = values.of(given["x"])
    count = max(1, math.prod(values.shape(given["x"])) // max(1, math.prod(values.shape(node))))
    return Bound(count * found.low, count * found.high)


# --- moves ----------------------------------------------------------------------------------------------


def _moved(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    """Entries stay; rows stay where the last axis does, or become parts of rows."""
    source = given.get("x", given.get("input"))
    found, was, now = values.of(source), values.shape(source), values.shape(node)
    if not was or not now or not now[-1] or was[-1] % now[-1]:
        found = replace(found, length=math.inf, total=math.inf)
    return found if was[-2:] == now[-2:] else replace(found, across=math.inf)


def _axes_moved(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    source = given["x"]
    found, rank = values.of(source), len(values.shape(source))
    order = list(range(rank))
    if "dims" in given:
        order = [each % rank for each in given["dims"]]
    elif "dim0" in given:
        first, second = given["dim0"] % rank, given["dim1"] % rank
        order[first], order[second] = order[second], order[first]
    else:
        order = order[::-1]
    lengths = {rank - 1: found.length, rank - 2: found.across}
    return replace(
        found,
        length=lengths.get(order[-1], math.inf),
        across=lengths.get(order[-2], math.inf) if rank > 1 else math.inf,
        total=found.total if order[-1] == rank - 1 else math.inf,
    )


def _picked(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    """Some of the entries, in any order and number; or rows of a known table."""
    found = values.of(given["x"])
    looked_up = values.known(given["x"]) is not None
    return replace(found, across=math.inf) if looked_up else Bound(found.low, found.high)


def _selected(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    found, rank = values.of(given["x"]), len(values.shape(given["x"]))
    last = given["dim"] % rank == rank - 1
    return Bound(found.low, found.high) if last else replace(found, across=math.inf)


def _joined(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    return bounds.hull(*(values.of(each) for each in given["tensors"]))


def _stacked(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    found = _joined(values, node, given)
    return Bound(found.low, found.high)


def _parts(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    """Slices of one tensor: parts of its rows at most."""
    return values.of(given["x"])


def _padded(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    """Zeros lengthen no row."""
    found, fill = values.of(given["x"]), float(given.get("value") or 0.0)
    low, high = min(found.low, fill), max(found.high, fill)
    return replace(found, low=low, high=high) if fill == 0 else Bound(low, high)


def _rolled(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    found = values.of(given["x"])
    return found if given.get("dims") else Bound(found.low, found.high)


def _part(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    source = node.args[0]
    if isinstance(source, fx.Node) and source.target is torch.ops.aten.unbind.int:
        found = values.of(source)
        return Bound(found.low, found.high)
    if isinstance(source, fx.Node) and getattr(source.target, "__name__", "").startswith("unnormalized_"):
        softmax = getattr(source.target, "__name__", "") == "unnormalized_softmax"
        inverse = SLACK if softmax else SLACK / values.form.least
        return values.of(source) if node.args[1] == 0 else Bound(0.0, inverse)
    return values.of(source)


def _embedding(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    found = values.of(given.get("weight", given.get("x")))
    return replace(found, across=math.inf)


# --- functions ------------------------------------------------------------------------------------------


def _norm(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    gain = Bound(1.0, 1.0) if given.get("weight") is None else values.of(given["weight"])
    bias = Bound(0.0, 0.0) if given.get("bias") is None else values.of(given["bias"])
    return bounds.of_norm(math.prod(given["normalized_shape"]), gain, bias)


def _softmax(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    _scaled_scores(values, node)
    rank = len(values.shape(node))
    along = SLACK if given["dim"] % rank == rank - 1 else math.inf
    return Bound(0.0, SLACK, along, math.inf, along)


def _unnormalized(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    _scaled_scores(values, node)
    return Bound(0.0, SLACK)


def _weights(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    """Attention weights that are no softmax: normalized ones average, those of ReLU are at most the largest power."""
    if given["kind"] == "sigmoid":
        _scaled_scores(values, node)
        return Bound(0.0, SLACK)
    if given["kind"] == "sink":
        _scaled_scores(values, node)
        return Bound(0.0, SLACK, SLACK, math.inf, SLACK)
    most = _largest_power(values, node, given)
    return Bound(0.0, SLACK * most, total=SLACK * most) if given["kind"] == "relu" else Bound(0.0, SLACK, total=SLACK)


def _powers(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    """Powers over the length of their row, whose sum is watched."""
    most = _largest_power(values, node, given)
    return Bound(-1e-2, SLACK * most, total=SLACK * min(most, values.form.largest_mean))


def _largest_power(values: Values, node: fx.Node, given: Mapping[str, Any]) -> float:
    """The largest yᵖ, where y = s/scale + shift of masked scores s."""
    mask = values.mask(node)
    factor = (1.0 if mask.scale is None else float(abs(mask.scale).max())) / given["scale"]
    biases = mask.bias if mask.tables is None or mask.tables.bias is None else mask.tables.bias
    bias = (0.0 if biases is None else float(abs(biases).max()) / given["scale"]) + abs(given["shift"])
    most = values.form.limit ** (1 / given["power"])
    peak = values.of(mask.core).peak * factor + bias
    if peak > most:
        values.need(mask.core, (most - bias) / factor)
        peak = most
    return float(peak ** given["power"])


def _scaled_scores(values: Values, node: fx.Node) -> None:
    mask = values.mask(node)
    scale = 1.0 if mask.scale is None else float(abs(mask.scale).max())
    if values.of(mask.core).peak * scale > values.form.limit:
        values.need(mask.core, values.form.limit / scale)


def _activation(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    """relu(x) less something small that vanishes at infinity: never larger than x itself, but for an error."""
    found = values.of(given["x"])
    last = (values.shape(node) or (1,))[-1]
    return Bound(-0.4, max(found.high, 0.0) + 1e-2, found.length + 1e-2 * math.sqrt(last))


def _softplus(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    """Between relu(x) and relu(x) + log 2/beta; what it is asked of is x at a threshold below that."""
    found, most = values.of(given["x"]), math.log(2) / given["beta"] + 1e-2 * max(1.0, 1 / given["beta"])
    least = min(0.0, max(found.low, given["threshold"] / given["beta"]))
    return Bound(least - 1e-2, max(found.high, 0.0) + most)


def _log_sigmoid(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    return Bound(min(values.of(given["x"]).low, 0.0) - math.log(2) - 1e-2, 1e-2)


def _exponential_unit(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    """s·x above 0, between 0 and −s·alpha below."""
    selu = (SELU_ALPHA, SELU_SCALE) if op_name(node) == "aten.selu" else None
    alpha, scale = selu or (float(given["alpha"]), float(given.get("scale", 1)))
    ends = (0.0, -alpha * 1.01, max(values.of(given["x"]).high, 0.0))
    return Bound(min(ends), max(ends)).scaled(scale, scale)


def _shrunk(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    found = values.of(given["x"])
    return replace(found, low=min(found.low, 0.0), high=max(found.high, 0.0))


def _rectified(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    found = values.of(given["x"])
    return replace(found, low=max(found.low, 0.0), high=max(found.high, 0.0))


def _leaky(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    slope = values.of(given.get("negative_slope", given.get("weight")))
    most = max(1.0, slope.peak)
    if times(values.of(given["x"]).peak, most) > values.form.limit:
        values.need(given["x"], values.form.limit / most)
    return values.of(given["x"]).scaled(-most, most)


def _between(low: float, high: float) -> Rule:
    return lambda values, node, given: Bound(low - 1e-2, high + 1e-2)


def _root(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    return Bound(0.0, SLACK * math.sqrt(values.form.inverse_limit))


def _inverse_root(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    return Bound(0.0, SLACK / math.sqrt(values.form.least))


def _inverse(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    return bounds.within(SLACK / values.form.least)


def _log(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    return Bound(math.log(values.form.least) - 1e-2, math.log(values.form.inverse_limit) + 1e-2)


def _exp2(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    high = min(values.of(given["x"]).high * math.log(2), choose_power(values.form.tolerances.exp).highest)
    return Bound(-1e-2, SLACK * math.exp(high))


def _expm1(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    return bounds.plus(_exp(values, node, given), Bound(-1.0, -1.0))


def _exp(values: Values, node: fx.Node, given: Mapping[str, Any]) -> Bound:
    high = min(values.of(given["x"]).high, choose_power(values.form.tolerances.exp).highest)
    return Bound(-1e-2, SLACK * math.exp(high))


def _named(rule: Rule, names: str) -> dict[str, Rule]:
    return {f"aten.{name}": rule for name in names.split()}


RULES: dict[str, Rule] = {
    **_named(_same, "alias detach to _to_copy type_as"),
    "dropout": lambda values, node, given: values.of(node.args[0]),
    **_named(_moved, "reshape flatten unflatten unsqueeze squeeze"),
    **_named(_moved, "expand expand_as repeat repeat_interleave"),
    **_named(_axes_moved, "transpose t permute"),
    **_named(_picked, "index index_select"),
    **_named(_selected, "select"),
    **_named(_parts, "slice split split_with_sizes chunk unbind"),
    **_named(_joined, "cat"),
    **_named(_padded, "constant_pad_nd"),
    **_named(_rolled, "flip roll"),
    **_named(_stacked, "stack"),
    "getitem": _part,
    **_named(_sum_of_two("x", "other", 1.0), "add"),
    **_named(_sum_of_two("x", "other", -1.0), "sub"),
    **_named(_sum_of_two("other", "x", -1.0), "rsub"),
    **_named(_negative, "neg"),
    **_named(_absolute, "abs"),
    **_named(_chosen("x", "other"), "maximum minimum where"),
    **_named(_chosen("x", "value"), "masked_fill"),
    **_named(_clamp, "clamp clamp_min clamp_max hardtanh"),
    **_named(_bits, "gt lt ge le"),
    **_named(_reduced, "mean amax amin"),
    **_named(_total, "sum"),
    **_named(products.multiplied, "mul"),
    **_named(products.squared, "square"),
    **_named(products.to_power, "pow"),
    **_named(products.divided, "div"),
    **_named(_inverse, "reciprocal"),
    **_named(_root, "sqrt"),
    **_named(_inverse_root, "rsqrt"),
    **_named(_log, "log log1p"),
    **_named(_exp, "exp"),
    **_named(_exp2, "exp2"),
    **_named(_expm1, "expm1"),
    **_named(products.linear, "linear"),
    **_named(products.matmul, "matmul"),
    **_named(_embedding, "embedding"),
    **_named(_norm, "layer_norm rms_norm"),
    "deviation_norm": _norm,
    **_named(_softmax, "softmax"),
    "unnormalized_softmax": _unnormalized,
    "attention_weights": _weights,
    "unnormalized_weights": _powers,
    **_named(_activation, "gelu silu mish hardswish"),
    **_named(_softplus, "softplus"),
    **_named(_log_sigmoid, "log_sigmoid"),
    **_named(_exponential_unit, "elu selu celu"),
    **_named(_shrunk, "hardshrink softshrink"),
    **_named(_rectified, "relu"),
    **_named(_leaky, "leaky_relu prelu"),
    **_named(_between(0.0, 1.0), "sigmoid hardsigmoid"),
    **_named(_between(-1.0, 1.0), "tanh"),
}
"""By the name an operator is registered under; a tensor of several parts has the bounds of all of them."""
