"""Values written into tensors, and dtypes taken from other tensors: as functions of what they depend on alone.

Before → after:
    index_put(x, [None, mask], value)  → masked_fill(x, mask, value)   w[:, :, mask] = -inf
    slice_scatter(x, y) of all of x    → y
    type_as(x, y), to(x, y)            → to(x, dtype of y)             a mask in the dtype of hidden values

So a mask that takes its dtype from hidden values is a constant, as it is when it names the dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from aero_compile.ir.rewriter import Rewriter
from aero_compile.ir.shapes import node_values, sample_shape
from aero_compile.model import TransformedModel

aten = torch.ops.aten

_SAME = (aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default, aten.detach.default)


def open_writes(model: TransformedModel) -> None:
    """Rewrite the writes of a captured graph, in place."""
    values = node_values(model, *sample_shape(model))
    for node in list(model.graph.nodes):
        new: fx.Node | None = None
        rewriter = Rewriter(node, values=values)
        if node.target in (aten.type_as.default, aten.to.other):
            new = _own_dtype(rewriter, node, values)
        elif node.target is aten.index_put.default:
            new = _filled(model, rewriter, node, values)
        elif node.target is aten.slice_scatter.default and _writes_all(node, values):
            new = node.args[1]
        if new is not None:
            rewriter.replace(new)


def _own_dtype(rewriter: Rewriter, node: fx.Node, values: Mapping[fx.Node, Any]) -> fx.Node | None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if values[source].dtype == values[node].dtype:
        return source
    return rewriter.call(aten.to.dtype, source, values[node].dtype)


def _writes_all(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    args: Sequence[Any] = (*node.args, None, None, None)
    into, source, _, start, end, step = args[:6]
    whole = start in (0, None) and step in (1, None) and (end is None or (isinstance(end, int) and end >= 2**62))
    return whole and (values[into].shape, values[into].dtype) == (values[source].shape, values[source].dtype)


def _filled(
    model: TransformedModel, rewriter: Rewriter, node: fx.Node, values: Mapping[fx.Node, Any]
) -> fx.Node | None:
    """The masked_fill that an index_put is, if it writes one value to where a mask is true."""
    args: Sequence[Any] = node.args
    into, indices, value, *accumulate = args
    masks: list[fx.Node] = [index for index in indices if index is not None]
    if any(accumulate) or len(masks) != 1 or values[masks[0]].dtype != torch.bool or values[value].numel() != 1:
        return None
    mask, leading = masks[0], list(indices).index(masks[0])
    for _ in range(values[into].dim() - leading - values[mask].dim()):
        mask = rewriter.call(aten.unsqueeze.default, mask, -1)
    number = _number(model, value)
    if number is not None:
        return rewriter.call(aten.masked_fill.Scalar, into, mask, number)
    return rewriter.call(aten.masked_fill.Tensor, into, mask, value)


def _number(model: TransformedModel, node: fx.Node) -> float | int | None:
    """The number that a tensor of one element holds, if it is written in the source."""
    while node.target in _SAME:
        node = node.all_input_nodes[0]
    if node.target is aten.full.default:
        number = node.args[1]
        return number if isinstance(number, int | float) else None
    if node.op != "get_attr" or not str(node.target).startswith("lifted_tensor"):
        return None
    value = operator.attrgetter(str(node.target))(model)
    known = isinstance(value, Tensor) and value.device.type != "meta"
    number = value.item() if known else None
    return number if isinstance(number, int | float) else None
