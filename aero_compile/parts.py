"""The parts of a decoder, as data: what `aero_compile.structure` finds and passes work on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

NORMS = frozenset({aten.layer_norm.default, aten.rms_norm.default})

ACTIVATIONS: Mapping[Any, str] = {
    aten.gelu.default: "gelu",
    aten.relu.default: "relu",
    aten.silu.default: "silu",
    aten.leaky_relu.default: "leaky_relu",
    aten.tanh.default: "tanh",
    aten.sigmoid.default: "sigmoid",
    aten.elu.default: "elu",
    aten.mish.default: "mish",
    aten.softplus.default: "softplus",
    aten.hardswish.default: "hardswish",
    aten.hardtanh.default: "hardtanh",
}
"""Nonlinear element-wise ops, and the kind they are counted as."""


ELEMENTARY: Mapping[Any, str] = {
    aten.exp.default: "exp",
    aten.expm1.default: "exp",
    aten.log.default: "log",
    aten.log1p.default: "log",
    aten.erf.default: "erf",
    aten.sqrt.default: "sqrt",
    aten.rsqrt.default: "rsqrt",
    aten.reciprocal.default: "reciprocal",
    aten.linalg_vector_norm.default: "norm",
    aten.abs.default: "abs",
    aten.sin.default: "sin",
    aten.cos.default: "cos",
    aten.clamp.default: "clamp",
    aten.clamp_min.default: "clamp",
    aten.clamp_max.default: "clamp",
    aten.maximum.default: "maximum",
    aten.minimum.default: "minimum",
    aten.amax.default: "maximum",
}
"""Nonlinear ops that no recognized activation, norm or softmax contains: counted under their own names."""


@dataclass(frozen=True)
class Heads:
    """Heads that are computed by one softmax: `scores` is their raw product QKᵀ, `softmax` what normalizes it."""

    softmax: fx.Node
    scores: fx.Node
    count: int


@dataclass(frozen=True)
class Attention:
    """The attention of one layer: usually all heads at once, or one group for each head of a Python list."""

    layer: int
    groups: tuple[Heads, ...]
    name: str

    @property
    def heads(self) -> int:
        return sum(group.count for group in self.groups)


@dataclass(frozen=True)
class Activation:
    """The nonlinear, element-wise part of an FFN, from its input `source` to its result `node`.

    `kind` is what it is counted as; `nodes` are all nodes that belong to it, one for a canonical op.
    """

    kind: str
    source: fx.Node
    node: fx.Node
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class FeedForward:
    """One feed-forward block.

    Attributes:
        entry: live value that every in-projection reads.
        inputs: in-projections; one, or two for a gated block.
        output: out-projection.
        activations: nonlinear element-wise parts between them; empty for a linear block.
        branch: (add, argument) edge where the block's result joins the residual stream.
        residual: (add, argument) edges of everything the result is added to, up to the residual stream.
    """

    layer: int
    entry: fx.Node
    inputs: tuple[fx.Node, ...]
    output: fx.Node
    activations: tuple[Activation, ...]
    branch: tuple[fx.Node, fx.Node]
    residual: tuple[tuple[fx.Node, fx.Node], ...]
    name: str


@dataclass(frozen=True)
class Norm:
    """One LayerNorm or RMSNorm; `layer` is None for the final one."""

    layer: int | None
    node: fx.Node
    name: str


@dataclass(frozen=True)
class Structure:
    """The parts of a decoder, in layer order. `values` holds the fake value of each node at a sample shape."""

    embedding: fx.Node
    vocab_size: int
    attentions: tuple[Attention, ...]
    ffns: tuple[FeedForward, ...]
    norms: tuple[Norm, ...]
    live: set[fx.Node] = field(repr=False)
    values: Mapping[fx.Node, Any] = field(repr=False)
