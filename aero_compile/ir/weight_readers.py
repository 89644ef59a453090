"""Who reads a weight. Every pass that replaces a weight, or writes to it, checks here first.

A weight may be read under several names (tied), by several layers, and through views: one transpose serves all of them.
What counts as a reader is the first operation that does more than move elements.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

from torch import Tensor, fx, nn

from aero_compile.errors import UnsupportedGraphError
from aero_compile.ir.ops import VIEWS, of_form

MOVES = VIEWS | of_form("select", "index", "index_select", "repeat", "detach")
"""Ops that put elements of their first argument elsewhere."""


def stored(model: nn.Module, node: fx.Node) -> Tensor:
    """The parameter or buffer that a `get_attr` node reads."""
    found = operator.attrgetter(str(node.target))(model)
    assert isinstance(found, Tensor)
    return found


def readers_of(node: fx.Node) -> set[fx.Node]:
    """What reads `node`, directly or through any number of views, the views themselves left out."""
    found: set[fx.Node] = set()
    for user in node.users:
        moved = user.target in MOVES and user.args[0] is node
        found |= readers_of(user) if moved else {user}
    return found


def weight_readers(model: nn.Module, graph: fx.Graph) -> dict[int, set[fx.Node]]:
    """What reads each parameter and buffer, under any name and through any views, by the tensor's `id`."""
    found: dict[int, set[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            found.setdefault(id(stored(model, node)), set()).update(readers_of(node))
    return found


def weights_read(model: nn.Module, graph: fx.Graph, without: Collection[fx.Node]) -> set[int]:
    """The parameters and buffers, by `id`, that the outputs still depend on once nobody computes `without`."""
    left, seen = set(without), set[fx.Node]()
    stack = [node for node in graph.nodes if node.op == "output"]
    while stack:
        node = stack.pop()
        if node not in seen and node not in left:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return {id(stored(model, node)) for node in seen if node.op == "get_attr"}


def check_unread(model: nn.Module, graph: fx.Graph, name: str, known: Collection[fx.Node]) -> None:
    """Refuse to give the weight `name` another value while anything but the `get_attr` nodes `known` reads it.

    Raises:
        UnsupportedGraphError: something else does; it would get the new value unnoticed.
    """
    for node in graph.nodes:
        if node.op == "get_attr" and node.target == name and node.users and node not in known:
            others = ", ".join(sorted(reader.name for reader in readers_of(node)))
            raise UnsupportedGraphError(f"the weight {name} cannot be replaced: {others} reads it as well")
