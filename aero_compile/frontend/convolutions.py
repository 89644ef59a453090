"""Convolutions over the sequence, `[B, d, T]`, with a kernel of one token → linear layers.

Before → after:
    conv1d(xᵀ, w[out, in, 1], b)                        → linear(x, w[out, in], b)ᵀ
    f(xᵀ)ᵀ for element-wise f, such as an activation    → f(x)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from aero_compile.ir.ops import ELEMENTWISE
from aero_compile.ir.rewriter import Rewriter
from aero_compile.ir.shapes import node_values, sample_shape
from aero_compile.model import TransformedModel

aten = torch.ops.aten

_NEUTRAL = {"stride": 1, "padding": 0, "dilation": 1, "transposed": 0, "output_padding": 0, "groups": 1}
_NAMES: Mapping[Any, tuple[str, ...]] = {
    aten.conv1d.default: ("stride", "padding", "dilation", "groups"),
    aten.convolution.default: ("stride", "padding", "dilation", "transposed", "output_padding", "groups"),
}


def open_convolutions(model: TransformedModel) -> None:
    """Make linear layers of the convolutions with a kernel of one token; others are left alone."""
    found = [node for node in model.graph.nodes if node.target in _NAMES]
    if not found:
        return
    values = node_values(model, *sample_shape(model))
    for node in found:
        if _is_pointwise(node, values):
            _convert(node)
    _move_down(model.graph, node_values(model, *sample_shape(model)))
    model.graph_changed()


def _is_pointwise(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    weight = node.args[1]
    assert isinstance(weight, fx.Node)
    given = dict(zip(_NAMES[node.target], node.args[3:], strict=False)) | dict(node.kwargs)
    neutral = all(value in (_NEUTRAL.get(name), [_NEUTRAL.get(name)]) for name, value in given.items())
    return neutral and values[weight].shape[2:] == (1,) and values[node].dim() == 3


def _convert(node: fx.Node) -> None:
    rewriter = Rewriter(node)
    call = rewriter.call
    source, weight = node.args[:2]
    bias = node.args[2] if len(node.args) > 2 else None
    assert isinstance(weight, fx.Node)
    plain = weight.target is aten.unsqueeze.default and weight.args[1] in (-1, 2)
    matrix = weight.args[0] if plain else call(aten.squeeze.dim, weight, -1)
    rows = call(aten.transpose.int, source, 1, 2)
    linear = call(aten.linear.default, rows, matrix, *([bias] if bias is not None else []))
    rewriter.replace(call(aten.transpose.int, linear, 1, 2))


def _is_channels_first(node: fx.Node) -> bool:
    return node.target is aten.transpose.int and set(node.args[1:]) in ({1, 2}, {-1, -2})


def _move_down(graph: fx.Graph, values: dict[fx.Node, Any]) -> None:
    """Move transpositions of [B, ·, ·] below element-wise ops, until others undo them."""
    for node in list(graph.nodes):
        inputs = node.all_input_nodes
        if not inputs or any(not _is_channels_first(parent) or values[parent].dim() != 3 for parent in inputs):
            continue
        rewriter = Rewriter(node, values=values)
        if _is_channels_first(node):
            rewriter.replace(inputs[0].args[0])
        elif node.target in ELEMENTWISE or node.op == "call_module":
            if any(values[parent].shape != values[node].shape for parent in inputs):
                continue
            moved = rewriter.copy(node, {parent: parent.args[0] for parent in inputs})
            rewriter.replace(rewriter.call(aten.transpose.int, moved, 1, 2))
