"""Edits of a graph that keep it valid."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import fx

if TYPE_CHECKING:
    from aero_compile.model import TransformedModel


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
