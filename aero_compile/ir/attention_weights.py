"""Attention weights that are no softmax: functions of the masked scores s of a row, exactly 0 where s is hidden.

n is the number of keys that a row sees, and y = s/scale + shift where it sees them:

    normalized:  w = yᵖ/(Σ yᵖ + n·ε)
    relu:        w = relu(y)ᵖ/n
    sigmoid:     w = σ(y − log n)
    sink:        w = exp(s)/(1 + Σ exp(s))

`attention_weights` is an op of the canonical graph beside `softmax`, at the same place: scores, scale and mask come
before it, dropout and the product with the values behind. A hidden score is one of at most `HIDDEN_BELOW`, whatever
number or infinity the model's mask is made of; so nothing depends on how an exponential would treat it.

"sink" is a softmax with one more key, of score 0 and without a value ("softmax off by one", Miller 2023). Its learned
score, as gpt-oss has one for each head, is taken off all others before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from aero_compile.ir.mask_values import HIDDEN_BELOW

aten = torch.ops.aten


def attention_weights(
    scores: Tensor, dim: int, kind: str, power: int = 1, scale: float = 1.0, shift: float = 0.0, eps: float = 0.0
) -> Tensor:
    """Weights of the keys, of the shape and type of `scores`.

    Args:
        scores: masked scores, `[…, queries, keys]`, floating-point.
        dim: the axis of the keys.
        kind: "normalized", "relu", "sigmoid" or "sink".
        power: p ≥ 1.
        scale, shift: of y.
        eps: ε ≥ 0, of "normalized" alone.
    """
    if kind == "sink":
        return softmax_with_sink(scores, dim)
    found = length_normalized(scores, dim, kind, power, scale, shift)
    if kind != "normalized":
        return found
    total = found.sum(dim, keepdim=True) + eps
    return found / torch.where(total == 0, 1.0, total)


SINK = ("sink", 1, 1.0, 0.0, 0.0)
"""The arguments of a softmax with a sink, after scores and axis."""


def softmax_with_sink(scores: Tensor, dim: int) -> Tensor:
    """exp(s)/(1 + Σ exp(s)) along `dim`, 0 where s is hidden."""
    seen = scores.masked_fill(scores <= HIDDEN_BELOW, -torch.inf)
    sink = torch.zeros_like(scores.narrow(dim, 0, 1))
    return torch.cat([seen, sink], dim).softmax(dim).narrow(dim, 0, scores.shape[dim])


def length_normalized(
    scores: Tensor, dim: int, kind: str, power: float = 1, scale: float = 1.0, shift: float = 0.0
) -> Tensor:
    """The same before rows are divided by their sum: yᵖ/n, relu(y)ᵖ/n or σ(y − log n)."""
    hidden = scores <= HIDDEN_BELOW
    seen = (~hidden).to(scores.dtype)
    count = seen.sum(dim, keepdim=True).clamp(min=1)
    y = torch.where(hidden, 0.0, scores) / scale + shift
    if kind == "sigmoid":
        return torch.sigmoid(y - count.log()) * seen
    return (torch.relu(y) if kind == "relu" else y) ** power * seen / count


def row_shares(weights: Tensor) -> Tensor:
    """Weights over the sum of their row, the last axis: shares that sum to one; a row of zeros stays one."""
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


_RELU = {1: "relu_attention", 2: "squared_relu_attention"}


def rows_sum_to_one(node: fx.Node) -> bool:
    """Whether the weights of a softmax, or of what stands in its place, are shares of each row."""
    return node.target is not attention_weights or _filled(node.args)[2] == "normalized"


def kind_of_weights(node: fx.Node) -> str:
    """What the node that makes attention weights is counted as: `softmax`, `2quad`, `relu_attention`, …"""
    if node.target is not attention_weights:
        return "softmax"
    _, _, kind, power, _, shift, _ = _filled(node.args)
    if kind == "sink":
        return "softmax"
    if kind == "relu":
        return _RELU.get(power, "relu_attention")
    if kind == "sigmoid":
        return "sigmoid_attention"
    if power == 1:
        return "linear_attention"
    return "2quad" if power == 2 and shift else "power_softmax"


def _filled(args: tuple[Any, ...]) -> tuple[Any, ...]:
    defaults = (None, -1, "normalized", 1, 1.0, 0.0, 0.0)
    return (*args, *defaults[len(args) :])
