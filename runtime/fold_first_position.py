"""Scale the first position alone, where a table of the server scales that one only.

Before → after (r of the server, T the length):
    x·[r, 1, 1, …]  → cat(x[:1]·r, x[1:])      1×d private products instead of T×d

Norms frozen with averages of their own for position 0 are written that way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from aero_compile.graphs.rewriting import tainted_nodes, weight_value

aten = torch.ops.aten


def scale_first_position(graph: fx.Graph, module: Any, tokens: str = "input_ids") -> fx.Graph:
    """Return `graph`, for sequences of more than one token, with such products changed in place."""
    live = tainted_nodes(graph, tokens)
    for node in list(graph.nodes):
        found = _table(node.args[1]) if node in live and node.target is aten.mul.Tensor else None
        if found is None:
            continue
        ratio, position = found
        value = weight_value(module, ratio)
        if tuple(value.shape) != (2,) or value[1] != 1:
            continue
        with graph.inserting_before(node):
            first = graph.call_function(aten.slice.Tensor, (node.args[0], position, 0, 1))
            others = graph.call_function(aten.slice.Tensor, (node.args[0], position, 1, 2**63 - 1))
            factor = graph.call_function(aten.slice.Tensor, (ratio, 0, 0, 1))
            scaled = graph.call_function(aten.mul.Tensor, (first, factor))
            joined = graph.call_function(aten.cat.default, ([scaled, others], position))
        node.replace_all_uses_with(joined)
        graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    graph.lint()
    return graph


def _table(rows: Any) -> tuple[fx.Node, int] | None:
    """(ratio, dimension from the last) if `rows` is ratio[min(position, 1)] along one dimension, of weights alone."""
    if not _calls(rows, aten.reshape.default) or not _calls(rows.args[0], aten.index.Tensor):
        return None
    ratio, places = rows.args[0].args
    if len(places) != 1 or not _calls(places[0], aten.clamp_max.default) or not _of_weights(ratio):
        return None
    positions, largest = places[0].args
    counts = largest == 1 and _calls(positions, aten.arange.default) and len(positions.args) == 1
    return (ratio, -len(rows.args[1])) if counts else None


def _calls(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def _of_weights(node: fx.Node) -> bool:
    """Whether parameters and buffers are all that `node` is computed from."""
    return node.op == "get_attr" or (bool(node.all_input_nodes) and all(map(_of_weights, node.all_input_nodes)))
