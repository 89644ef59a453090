"""Compute what depends on weights alone, once, so that an exported graph holds its results.

    reciprocal(α)                 → a tensor
    exp(neg(log_t[:, :T]))        → (a tensor)[:, :T]     element-wise ops move above slices and views
    g·(V / ‖V‖)                   → a tensor

Weights that are only moved (transposed, sliced) stay as they are: a copy would not be tied to the original.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from aero_compile.rewriting import VIEWS, copy_place
from aero_compile.trainable import TransformedModel, remove_dead_nodes

aten = torch.ops.aten

MOVES = VIEWS | {
    aten.t.default,
    aten.select.int,
    aten.repeat.default,
    aten.repeat_interleave.self_int,
    aten.index.Tensor,
    aten.index_select.default,
    aten.detach.default,
    aten.embedding.default,
}
"""Ops that put elements of their first argument elsewhere, and compute nothing."""


def fold_weights(graph: fx.Graph, model: TransformedModel) -> None:
    """Edit `graph` in place; the results become parameters of `model`, named after the weight they come from.

    Nothing that depends on an input of the graph, or on its shape, is folded.
    """
    fixed: dict[fx.Node, bool] = {}
    for node in list(graph.nodes):
        _hoist(node, fixed)
    _classify(graph, fixed)
    values: dict[fx.Node, Tensor] = {}
    taken = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    for node in list(graph.nodes):
        computed = fixed.get(node, False)
        if not computed or not any(not fixed.get(user, False) for user in node.users):
            continue
        with torch.no_grad():
            value = _value(node, model, values)
        name = _fresh_name(node, taken)
        model.add_tensor(name, nn.Parameter(value.contiguous(), requires_grad=False))
        with graph.inserting_before(node):
            constant = graph.create_node("get_attr", name, (), {})
        node.replace_all_uses_with(constant)
    remove_dead_nodes(graph)
    graph.lint()


def _classify(graph: fx.Graph, fixed: dict[fx.Node, bool]) -> None:
    """Which nodes follow from weights alone; the value says whether anything was computed, not just moved."""
    for node in graph.nodes:
        _classify_one(node, fixed)


def _classify_one(node: fx.Node, fixed: dict[fx.Node, bool]) -> None:
    if node.op == "get_attr":
        fixed[node] = False
    elif node.op == "call_function" and node.all_input_nodes and all(p in fixed for p in node.all_input_nodes):
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if not random:
            fixed[node] = node.target not in MOVES or any(fixed[parent] for parent in node.all_input_nodes)


def _hoist(node: fx.Node, fixed: dict[fx.Node, bool]) -> None:
    """f(move(w)) → move(f(w)) for an element-wise f of one tensor, again and again up to the weight."""
    while _is_pointwise(node):
        (move,) = node.all_input_nodes
        if move.target not in MOVES or move in fixed or not _moves_weight(move, fixed):
            break
        source = move.args[0]
        assert isinstance(source, fx.Node)
        graph = node.graph
        with graph.inserting_before(node):
            args = fx.map_arg(node.args, lambda arg: source if arg is move else arg)  # noqa: B023
            inner = graph.call_function(node.target, args, node.kwargs)  # type: ignore[arg-type]
            outer = graph.call_function(move.target, (inner, *move.args[1:]), move.kwargs)  # type: ignore[arg-type]
        for new in (inner, outer):
            copy_place(node, new)
        node.replace_all_uses_with(outer)
        graph.erase_node(node)
        _classify_one(inner, fixed)
        node = inner
    if not node._erased:
        _classify_one(node, fixed)


def _is_pointwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and torch.Tag.pointwise in tags and len(node.all_input_nodes) == 1


def _moves_weight(move: fx.Node, fixed: Mapping[fx.Node, bool]) -> bool:
    """Whether the elements that `move` moves are those of a weight; its indices and sizes may be anything."""
    node: Any = move
    while isinstance(node, fx.Node) and node.target in MOVES and node not in fixed:
        node = node.args[0]
    return node in fixed


def _value(node: fx.Node, model: nn.Module, known: dict[fx.Node, Tensor]) -> Tensor:
    if node not in known:
        if node.op == "get_attr":
            value: Any = model
            for part in str(node.target).split("."):
                value = getattr(value, part)
            known[node] = value.detach()
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda parent: _value(parent, model, known))
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]


def _fresh_name(node: fx.Node, taken: set[str]) -> str:
    """`scaled_ffn.0.alpha_reciprocal` for the reciprocal of `scaled_ffn.0.alpha`."""
    weight = node
    while weight.op != "get_attr":
        weight = weight.all_input_nodes[0]
    operation = str(node.target).removeprefix("aten.").partition(".")[0]
    base = f"{weight.target}_{operation}"
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    return name
