"""The parts of a decoder, as data: what `aero_compile.analysis.structure` finds and passes work on."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from aero_compile.ir.deviation_norm import deviation_norm
from aero_compile.ir.rewriting import VIEWS

aten = torch.ops.aten

NORMS: frozenset[Any] = frozenset({aten.layer_norm.default, aten.rms_norm.default, deviation_norm})

ACTIVATIONS: Mapping[Any, str] = {
    aten.gelu.default: "gelu",
    aten.relu.default: "relu",
    aten.silu.default: "silu",
    aten.leaky_relu.default: "leaky_relu",
    aten.prelu.default: "leaky_relu",
    aten.tanh.default: "tanh",
    aten.sigmoid.default: "sigmoid",
    aten.elu.default: "elu",
    aten.mish.default: "mish",
    aten.softplus.default: "softplus",
    aten.hardswish.default: "hardswish",
    aten.hardtanh.default: "hardtanh",
}
"""Nonlinear element-wise ops, and the kind they are counted as."""


COMPARISONS = frozenset(
    getattr(getattr(aten, name), form) for name in ("gt", "ge", "lt", "le", "eq", "ne") for form in ("Scalar", "Tensor")
)

_TRUTH = COMPARISONS | frozenset(
    {
        *(aten.logical_not.default, aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default),
        *(aten.bitwise_not.default, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor),
        *(aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor),
    }
)
"""Ops that give truth values."""

_INDICES = frozenset({aten.argmax.default, aten.argmin.default, aten.one_hot.default})

_CASTS = frozenset({aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.to.other, aten.type_as.default})

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
    aten.amin.default: "minimum",
    aten.max.dim: "maximum",
    aten.min.dim: "minimum",
    aten.max.default: "maximum",
    aten.min.default: "minimum",
    aten.relu6.default: "hardtanh",
    aten.sign.default: "comparison",
    aten.sgn.default: "comparison",
    aten.heaviside.default: "comparison",
    **dict.fromkeys(COMPARISONS, "comparison"),
}
"""Nonlinear ops that no recognized activation, norm or softmax contains: counted under their own names.

Comparisons of hidden values are one kind; what is done with their truth values is a choice or a product."""


LINEAR = VIEWS | {
    aten.linear.default,
    aten.matmul.default,
    aten.embedding.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.rsub.Scalar,
    aten.neg.default,
    aten.mul.Tensor,
    aten.square.default,
    aten.cat.default,
    aten.slice_scatter.default,
    aten.stack.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.unbind.int,
    aten.select.int,
    aten.repeat.default,
    aten.repeat_interleave.self_int,
    aten.roll.default,
    aten.flip.default,
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.cumsum.default,
    aten.convolution.default,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.constant_pad_nd.default,
    aten.pad.default,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.where.self,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.tril.default,
    aten.triu.default,
    aten.detach.default,
    aten.view_as_complex.default,
    aten.view_as_real.default,
    *(_TRUTH - COMPARISONS),
    operator.getitem,
}
"""Ops that are linear in hidden values, select them, or multiply them: not counted.

Comparisons that make the choice are counted, so that a choice by hidden values counts once."""


def nonlinear_kind(node: fx.Node, live: set[fx.Node]) -> str | None:
    """What a live node is counted as, or None for linear ops and products; unknown ops go by their own name.

    Softmax and norms, which are counted as such, give None as well.
    """
    if node.op != "call_function" or node.target in LINEAR or node.target in NORMS:
        return None
    if node.target is aten.softmax.int:
        return None
    if node.target is aten.pow.Tensor_Scalar:
        exponent = node.args[1]
        whole = isinstance(exponent, int | float) and float(exponent).is_integer() and exponent > 0
        return None if whole else "pow"
    if node.target is aten.div.Tensor:
        return "division" if node.args[1] in live else None
    if node.target in _CASTS:
        return "truncation" if _truncates(node) else None
    known = ACTIVATIONS.get(node.target) or ELEMENTARY.get(node.target)
    return known or str(node.target).removeprefix("aten.").partition(".")[0]


def _truncates(cast: fx.Node) -> bool:
    """Whether a cast makes integers of fractions."""
    wanted = cast.kwargs.get("dtype", cast.args[1] if len(cast.args) > 1 else None)
    source = cast.args[0]
    whole = isinstance(source, fx.Node) and (source.target in _TRUTH or source.target in _INDICES)
    return isinstance(wanted, torch.dtype) and not wanted.is_floating_point and not wanted.is_complex and not whole


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
    """The parts of a decoder, in layer order.

    `first_token` is the row of the first token: not 0 where a learned prefix comes before the tokens, and None if that
    cannot be told. `live` are the nodes that hold hidden values, `depth` how many attentions each of them comes after,
    and `values` the fake value of every node at a sample shape.
    """

    embedding: fx.Node
    vocab_size: int
    attentions: tuple[Attention, ...]
    ffns: tuple[FeedForward, ...]
    norms: tuple[Norm, ...]
    live: set[fx.Node] = field(repr=False)
    depth: Mapping[fx.Node, int] = field(repr=False)
    values: Mapping[fx.Node, Any] = field(repr=False)
    first_token: int | None = 0
