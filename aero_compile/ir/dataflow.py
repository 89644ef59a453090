"""What a value depends on: the tokens, hidden values, other nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from aero_compile.ir.graph_model import GraphModel
from aero_compile.ir.ops import SHAPE_ONLY, VIEWS
from aero_compile.ir.shapes import is_floating, node_values, sample_shape


def placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """The input node called `name`."""
    found: fx.Node = next(node for node in graph.find_nodes(op="placeholder") if node.target == name)
    return found


def tainted_nodes(graph: fx.Graph, source: str) -> set[fx.Node]:
    """Nodes whose value depends on the values of the input `source`, itself included."""
    tainted: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.target == source:
                tainted.add(node)
        elif node.target not in SHAPE_ONLY and any(parent in tainted for parent in node.all_input_nodes):
            tainted.add(node)
    return tainted


def hidden_nodes(graph: fx.Graph, tokens: str, values: Mapping[fx.Node, Any]) -> set[fx.Node]:
    """Live nodes: floating-point values computed from the tokens, and what is computed from those.

    So comparisons of hidden values and the indices of their maxima are live; positions and padding masks, which are
    computed from token ids without a look at a hidden value, are not.
    """
    tainted = tainted_nodes(graph, tokens)
    live: set[fx.Node] = set()
    for node in graph.nodes:
        from_hidden = node.target not in SHAPE_ONLY and any(parent in live for parent in node.all_input_nodes)
        if node in tainted and (is_floating(values.get(node)) or from_hidden):
            live.add(node)
    return live


def live_values(model: GraphModel) -> tuple[set[fx.Node], dict[fx.Node, Any]]:
    """Live nodes (see `hidden_nodes`), and the fake values of all nodes."""
    values = node_values(model, *sample_shape(model))
    return hidden_nodes(model.graph, model.convention.tokens, values), values


def live_inputs(node: fx.Node, live: set[fx.Node]) -> list[fx.Node]:
    """Distinct inputs of `node` that are live."""
    return [parent for parent in node.all_input_nodes if parent in live]


def ancestors(nodes: Iterable[fx.Node], within: set[fx.Node]) -> set[fx.Node]:
    """All nodes of `within` that the values of `nodes` depend on, `nodes` included."""
    seen: set[fx.Node] = set()
    stack = [node for node in nodes if node in within]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(parent for parent in node.all_input_nodes if parent in within)
    return seen


def through_views(node: fx.Node) -> fx.Node:
    """The value that `node` is a view of."""
    while node.op == "call_function" and node.target in VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
