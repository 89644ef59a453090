"""Which part of its inputs a node needs to be computed at one position, op by op.

An axis is followed from a result back to the operands by what each op does, never by its size alone: sizes of heads,
widths and lengths may coincide. Where an op mixes positions, or is not known, there is no cut.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten


@dataclass(frozen=True)
class Axis:
    """The dimension `dim` runs over positions: its index is `(o·T + t)·inner + i` at position t.

    Mostly `inner` is 1 and there is one o. Products over shared keys fold heads into it, `[B, T·H, d]`, and linear
    layers written for matrices the batch, `[B·T, d]`.
    """

    dim: int
    inner: int = 1


@dataclass(frozen=True)
class Cut:
    """A node at one position: the axes along which inputs are cut (the others stay whole), and the call's arguments."""

    inputs: Mapping[fx.Node, Axis]
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Site:
    """A node whose result is wanted at one position of `axis`, looked at where sequences have `length` positions."""

    node: fx.Node
    axis: Axis
    values: Mapping[fx.Node, Any]
    length: int

    def arg(self, index: int, default: Any = None) -> Any:
        return self.node.args[index] if len(self.node.args) > index else default

    def shape(self, node: fx.Node | None = None) -> tuple[int, ...]:
        value = self.values[self.node if node is None else node]
        return tuple((value if isinstance(value, Tensor) else value[0]).shape)

    def moved(self, dim: int) -> Axis:
        return Axis(dim, self.axis.inner)

    def aligned(self, node: fx.Node) -> Axis | None:
        """The axis in an operand that is broadcast to the result; None if it is the same at all positions."""
        shape = self.shape(node)
        dim = self.axis.dim - len(self.shape()) + len(shape)
        return self.moved(dim) if dim >= 0 and shape[dim] != 1 else None

    def outer(self) -> int:
        return self.shape()[self.axis.dim] // (self.length * self.axis.inner)


Operands = list[tuple[Any, Axis | None]]
Rule = Callable[[Site], Operands | None]


def find_cut(node: fx.Node, axis: Axis, values: Mapping[fx.Node, Any], length: int) -> Cut | None:
    """How to compute `node` at one position of `axis`, given its inputs at that position; None if that is unknown.

    Args:
        node: a node whose result is a tensor, or a list of tensors that are cut along the same axis.
        axis: of the result.
        values: (fake) values of all nodes at a batch of more than 1 and a `length` of more than 1.
        length: T.
    """
    rule = _pointwise if _is_pointwise(node) else _RULES.get(node.target)
    site = Site(node, axis, values, length)
    operands = rule(site) if rule is not None else None
    if operands is None:
        return None
    inputs: dict[fx.Node, Axis | None] = {}
    for operand, where in operands:
        if inputs.setdefault(operand, where) != where:
            return None  # one value, needed both whole and at one position
    args = _resized(site) if node.target in _SIZED else node.args
    if args is None:
        return None
    return Cut({operand: where for operand, where in inputs.items() if where is not None}, args)


# -- element by element ------------------------------------------------------------------------------------------

_ALSO_POINTWISE = frozenset(
    {
        aten.masked_fill.Tensor,
        aten.where.ScalarOther,
        aten.where.ScalarSelf,
        aten.hardswish.default,
        aten.to.dtype,
        aten.alias.default,
        aten.contiguous.default,
        aten.detach.default,
        aten.dropout.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
    }
)


def _is_pointwise(node: fx.Node) -> bool:
    if node.op == "call_module":  # dropout: what else a graph holds computes weights
        return True
    return node.target in _ALSO_POINTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _pointwise(site: Site) -> Operands:
    tensors = [each for each in site.node.all_input_nodes if isinstance(site.values[each], Tensor)]
    return [(each, site.aligned(each)) for each in tensors]


def _prelu(site: Site) -> Operands | None:
    x, slope = site.node.args
    assert isinstance(slope, fx.Node)
    return [(x, site.axis)] if math.prod(site.shape(slope)) == 1 else None


# -- along other dimensions --------------------------------------------------------------------------------------


def _beside(index: int, default: Any = 0, *, operands: int = 1) -> Rule:
    """An op along the dimension in argument `index`: it leaves every other one as it is."""

    def rule(site: Site) -> Operands | None:
        dim = site.arg(index, default)
        if dim is None or dim % len(site.shape(site.node.all_input_nodes[0])) == site.axis.dim:
            return None
        return [(site.arg(i), site.axis) for i in range(operands)]

    return rule


def _cat(site: Site) -> Operands | None:
    if site.arg(1, 0) % len(site.shape()) == site.axis.dim:
        return None
    return [(each, site.axis) for each in site.arg(0)]


def _stack(site: Site) -> Operands | None:
    dim = site.arg(1, 0) % len(site.shape())
    if dim == site.axis.dim:
        return None
    return [(each, site.moved(site.axis.dim - (dim < site.axis.dim))) for each in site.arg(0)]


def _select(site: Site) -> Operands:
    """Also unbind: a dimension is gone."""
    dim = site.arg(1, 0) % len(site.shape(site.arg(0)))
    return [(site.arg(0), site.moved(site.axis.dim + (dim <= site.axis.dim)))]


def _reduce(site: Site) -> Operands | None:
    inner, dims, keep = site.arg(0), site.arg(1), site.arg(2, site.node.kwargs.get("keepdim", False))
    rank = len(site.shape(inner))
    if not dims:
        return None
    gone = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)}
    left = [dim for dim in range(rank) if keep or dim not in gone]
    return None if left[site.axis.dim] in gone else [(inner, site.moved(left[site.axis.dim]))]


def _norm(site: Site) -> Operands | None:
    return [(site.arg(0), site.axis)] if site.axis.dim < len(site.shape()) - len(site.arg(1)) else None


def _pad(site: Site) -> Operands | None:
    padded = len(site.arg(1)) // 2
    return [(site.arg(0), site.axis)] if site.axis.dim < len(site.shape()) - padded else None


# -- products and lookups ----------------------------------------------------------------------------------------


def _linear(site: Site) -> Operands | None:
    """Also view_as_real: everything but the last dimension stays."""
    return [(site.arg(0), site.axis)] if site.axis.dim < len(site.shape()) - 1 else None


def _matmul(site: Site) -> Operands | None:
    left, right = site.node.args
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    ranks = len(site.shape(left)), len(site.shape(right))
    rank = len(site.shape())
    if min(ranks) < 2:
        return None
    if site.axis.dim == rank - 2:
        return [(left, site.moved(ranks[0] - 2)), (right, None)]
    if site.axis.dim == rank - 1:
        return [(left, None), (right, site.moved(ranks[1] - 1))]
    return [(left, site.aligned(left)), (right, site.aligned(right))]


def _embedding(site: Site) -> Operands | None:
    table, ids = site.arg(0), site.arg(1)
    return [(table, None), (ids, site.axis)] if site.axis.dim < len(site.shape(ids)) else None


def _index(site: Site) -> Operands | None:
    """Rows of a table, or entries along dimensions behind the axis."""
    table, indices = site.arg(0), site.arg(1)
    used = [i for i, each in enumerate(indices) if each is not None]
    if len(used) == 1 and site.axis.dim < used[0]:
        return [(table, site.axis)]
    if used == [0] and site.axis.dim < len(site.shape(indices[0])):
        return [(table, None), (indices[0], site.axis)]
    return None


# -- views -------------------------------------------------------------------------------------------------------


def _transpose(site: Site) -> Operands:
    rank = len(site.shape())
    one, other = (site.arg(i) % rank for i in (1, 2))
    return [(site.arg(0), site.moved({one: other, other: one}.get(site.axis.dim, site.axis.dim)))]


def _permute(site: Site) -> Operands:
    return [(site.arg(0), site.moved(site.arg(1)[site.axis.dim] % len(site.shape())))]


def _reshape(site: Site) -> Operands | None:
    """Views that keep the order of elements: the axis is where a step of one position is as many elements wide."""
    step = site.axis.inner * math.prod(site.shape()[site.axis.dim + 1 :])
    shape = site.shape(site.arg(0))
    for dim, size in enumerate(shape):
        below = math.prod(shape[dim + 1 :])
        inner = step // below
        if step % below == 0 and inner and size % (inner * site.length) == 0:
            return [(site.arg(0), Axis(dim, inner))]
    return None


def _squeeze(site: Site) -> Operands | None:
    rank = len(site.shape(site.arg(0)))
    stays = rank == len(site.shape()) and site.arg(1) % rank == site.axis.dim
    return None if stays else _reshape(site)  # one position would be squeezed out


def _expand(site: Site) -> Operands:
    return [(site.arg(0), site.aligned(site.arg(0)))]


def _repeat(site: Site) -> Operands | None:
    return [(site.arg(0), site.aligned(site.arg(0)))] if site.arg(1)[site.axis.dim] == 1 else None


def _getitem(site: Site) -> Operands:
    return [(site.arg(0), site.axis)]


_SIZED = frozenset({aten.view.default, aten.reshape.default, aten.expand.default, aten.unflatten.int})


def _resized(site: Site) -> tuple[Any, ...] | None:
    """The arguments of a view whose result has one position."""
    first = site.arg(1) % len(site.shape(site.arg(0))) if site.node.target is aten.unflatten.int else 0
    at = site.axis.dim - first
    *before, sizes = site.node.args
    if site.node.target is aten.unflatten.int and not 0 <= at < len(sizes):
        return site.node.args
    sizes = list(sizes)
    broadcast = site.node.target is aten.expand.default
    if broadcast and site.aligned(site.arg(0)) is not None:
        sizes[at] = -1
    elif site.outer() == 1:
        sizes[at] = site.axis.inner
    elif broadcast or (sizes[at] != -1 and -1 in sizes):
        return None
    else:
        sizes[at] = -1
    return (*before, sizes)


_RULES: dict[Any, Rule] = {
    operator.getitem: _getitem,
    aten.prelu.default: _prelu,
    aten.softmax.int: _beside(1),
    aten.cumsum.default: _beside(1),
    aten.index_select.default: _beside(1),
    aten.slice.Tensor: _beside(1),
    aten.split.Tensor: _beside(2),
    aten.split_with_sizes.default: _beside(2),
    aten.chunk.default: _beside(2),
    aten.repeat_interleave.self_int: _beside(2, None),
    aten.slice_scatter.default: _beside(2, operands=2),
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.select.int: _select,
    aten.unbind.int: _select,
    aten.sum.dim_IntList: _reduce,
    aten.mean.dim: _reduce,
    aten.amax.default: _reduce,
    aten.amin.default: _reduce,
    aten.layer_norm.default: _norm,
    aten.rms_norm.default: _norm,
    aten.constant_pad_nd.default: _pad,
    aten.linear.default: _linear,
    aten.view_as_real.default: _linear,
    aten.view_as_complex.default: _getitem,
    aten.matmul.default: _matmul,
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.squeeze.dim: _squeeze,
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
    **dict.fromkeys(
        (
            aten.view.default,
            aten.reshape.default,
            aten.flatten.using_ints,
            aten.unflatten.int,
            aten.unsqueeze.default,
        ),
        _reshape,
    ),
}
