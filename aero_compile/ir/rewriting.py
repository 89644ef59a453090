"""What passes share: liveness, shapes, and edits of a graph that keep it valid."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from aero_compile.ir.shapes import node_values as node_values

if TYPE_CHECKING:
    from aero_compile.model import TransformedModel

aten = torch.ops.aten

SHAPE_ONLY = frozenset(
    {
        aten.sym_size.int,
        aten.sym_numel.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.new_empty.default,
    }
)
"""Ops whose result depends on the shape of their tensor argument and not on its values."""

VIEWS = frozenset(
    {
        aten.reshape.default,
        aten.view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.default,
        aten.flatten.using_ints,
        aten.alias.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.expand.default,
        aten.slice.Tensor,
        aten.transpose.int,
        aten.permute.default,
        aten.unflatten.int,
    }
)
"""Ops that only move elements."""


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


def source_path(node: fx.Node) -> str:
    """Name of the source module that `node` was captured from (`transformer.h.0.mlp`), or an empty string."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else str(node.meta.get("path", ""))


def place(node: fx.Node) -> str:
    """Where `node` is, for error messages."""
    path = source_path(node)
    return f"{node.name} in {path}" if path else node.name


def insert_call(
    graph: fx.Graph, before: fx.Node, target: Callable[..., Any], *args: Any, like: fx.Node | None = None
) -> fx.Node:
    """Add a call of `target` in front of `before`; its place in the source model is that of `like`."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
    copy_place(like if like is not None else before, node)
    return node


def copy_place(source: fx.Node, target: fx.Node) -> None:
    """Let `target` be reported at the place of `source`."""
    for key in ("nn_module_stack", "path"):
        if key in source.meta:
            target.meta[key] = source.meta[key]


def replace_node(old: fx.Node, new: fx.Node) -> None:
    """Let every user of `old` use `new` and erase `old`."""
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    old.graph.erase_node(old)


def bypass(node: fx.Node, value: fx.Node) -> None:
    """Erase `node`; its users get `value` instead."""
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def parameter_node(model: TransformedModel, name: str, before: fx.Node) -> fx.Node:
    """A node that reads the parameter `name`, placed at the head of the graph if there is none yet."""
    found: list[fx.Node] = list(model.graph.find_nodes(op="get_attr", target=name))
    if found:
        return found[0]
    with model.graph.inserting_before(next(iter(model.graph.nodes))):
        return model.graph.create_node("get_attr", name, (), {})


def through_views(node: fx.Node) -> fx.Node:
    """The value that `node` is a view of."""
    while node.op == "call_function" and node.target in VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def call_in_eval(module: torch.nn.Module, *args: Any, buffers: dict[str, Tensor] | None = None) -> Any:
    """The result of `module` in evaluation mode, with other `buffers` if given; its mode stays as it was."""
    training = module.training
    module.eval()
    try:
        return torch.func.functional_call(module, buffers or {}, args)
    finally:
        module.train(training)


def weight_value(model: TransformedModel, node: fx.Node, known: dict[fx.Node, Any] | None = None) -> Any:
    """Value, as in evaluation mode, of a node that is computed from parameters, buffers and constants alone.

    Args:
        model: whose parameters; on the meta device the value is a meta tensor.
        node: the root of the expression.
        known: values found so far; those found here are added.
    """
    known = {} if known is None else known
    if node in known:
        return known[node]
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(model).detach()
    else:
        inputs = {parent: weight_value(model, parent, known) for parent in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, node.kwargs), inputs.__getitem__)
        with torch.no_grad():
            if node.op == "call_module":
                value = call_in_eval(model.get_submodule(str(node.target)), *args)
            else:
                value = node.target(*args, **kwargs)  # type: ignore[operator]
    known[node] = value
    return value


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


def sample_shape(model: TransformedModel) -> tuple[int, int]:
    """`[B, T]` at which shapes are looked at: no size is 1, to see folded batches, unless there is no choice."""
    if model.fixed_shape is not None:
        return model.fixed_shape
    return 3, 11 if model.max_positions is None else max(2, min(11, model.max_positions))


def is_floating(value: Any) -> bool:
    """Whether a node's value is a floating-point or complex tensor, or a tuple that holds one."""
    if isinstance(value, tuple | list):
        return any(is_floating(item) for item in value)
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


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


def live_values(model: TransformedModel) -> tuple[set[fx.Node], dict[fx.Node, Any]]:
    """Live nodes (see `hidden_nodes`), and the fake values of all nodes."""
    values = node_values(model, *sample_shape(model))
    return hidden_nodes(model.graph, model.convention.tokens, values), values
