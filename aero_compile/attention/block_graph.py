"""A region as a Python function of one block of its rows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from aero_compile.attention.regions import Axes, NotRecognized, Region
from aero_compile.attention.row_measures import Measures, measured
from aero_compile.ir.compile_graph import compile_graph
from aero_compile.ir.graph_model import remove_dead_nodes

aten = torch.ops.aten

Block = Callable[..., tuple[Tensor, ...]]
"""(first row, rows, keys, *inputs, *modules) → values of the block; inputs are cut along their axes."""


def block_function(region: Region, results: Sequence[fx.Node], measures: Measures = ()) -> Block:
    """Compile what gives the block of `results`, nodes of the region, and what is measured of its rows, `[…, rows]`.

    Raises:
        NotRecognized: a size that is written in the graph cannot be told to be one of rows or of keys.
    """
    graph = fx.Graph()
    first, rows, keys = (graph.placeholder(name) for name in ("first_row", "rows", "keys"))
    copies = {node: graph.placeholder(f"input_{i}") for i, node in enumerate(region.inputs)}
    held = {node: graph.placeholder(f"module_{i}") for i, node in enumerate(modules(region))}
    for node, axes in region.nodes.items():
        if node.op == "call_module":
            copies[node] = graph.call_function(_apply, (held[node], copies[cast("fx.Node", node.args[0])]))
            continue
        args = tuple(node.args)
        if node is not region.product:
            args = _resized(region, node, axes, {"rows": rows, "keys": keys})
        if node.target in (aten.tril.default, aten.triu.default):
            diagonal = args[1] if len(args) > 1 else 0
            args = (args[0], graph.call_function(operator.add, (first, diagonal)))
        copied = fx.map_arg((args, node.kwargs), lambda each: copies.get(each, each))
        copies[node] = graph.call_function(cast("Any", node.target), *copied)
    found = [copies[node] for node in results]
    found += [measured(graph, copies[region.heads.softmax], measure) for measure in measures]
    graph.output(tuple(found))
    remove_dead_nodes(graph)
    function = compile_graph(graph)
    return lambda *values: function(None, *values)


def modules(region: Region) -> tuple[fx.Node, ...]:
    """The dropouts of a region."""
    return tuple(node for node in region.nodes if node.op == "call_module")


def _apply(module: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    return module(value)


_SIZES: Mapping[Any, int] = {
    aten.reshape.default: 1,
    aten.expand.default: 1,
    aten.ones.default: 0,
    aten.zeros.default: 0,
    aten.full.default: 0,
}
"""Ops whose result has written sizes, and the argument that they are in."""


def _resized(region: Region, node: fx.Node, axes: Axes, sizes: dict[str, fx.Node]) -> tuple[Any, ...]:
    """The arguments of `node` with the sizes of a block."""
    at = _SIZES.get(node.target)
    if at is None:
        if node.target is aten.unflatten.int:
            raise NotRecognized("the scores are unflattened")
        return tuple(node.args)
    written = list(cast("list[Any]", node.args[at]))
    if len(written) != region.values[node].dim():
        raise NotRecognized(f"{node.target} is called in an unknown form")
    for name, dim in (("rows", axes.rows), ("keys", axes.keys)):
        if dim is not None:
            written[dim] = sizes[name]
    return (*node.args[:at], written, *node.args[at + 1 :])
