"""What follows from the position of a step that any position takes: known to a party, but another value at each.

A program is compiled once for all positions, so such a value is no constant of it: it is an input, of which a party
holds the values of all positions, and gives the one of the position at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from aero_compile.ir.dataflow import values_read
from aero_compile.ir.weight_values import node_value


@dataclass(frozen=True)
class Positions:
    """The input `position` of a graph that reads its tensors from `module`: it is each of `range(count)`."""

    module: torch.nn.Module
    position: fx.Node
    count: int
    _follow: dict[fx.Node, bool] = field(default_factory=dict, repr=False)
    _values: dict[tuple[fx.Node, int], Any] = field(default_factory=dict, repr=False)

    def decide(self, node: fx.Node) -> bool:
        """Whether the value of a node follows from the position."""
        if node is self.position:
            return True
        if node not in self._follow:
            self._follow[node] = any(self.decide(each) for each in values_read(node))
        return self._follow[node]

    def value(self, node: fx.Node, position: int, known: Mapping[fx.Node, Any]) -> Any:
        """The value of a node that is not live at a position; `known`: of those that do not follow from it."""
        if node is self.position:
            return position
        if not self.decide(node):
            return known[node]
        if (node, position) not in self._values:
            found = node_value(self.module, node, lambda each: self.value(each, position, known))
            self._values[node, position] = found
        return self._values[node, position]

    def table(self, node: fx.Node, known: Mapping[fx.Node, Any]) -> Tensor | None:
        """The values of a node at all positions, [positions, ...]; None if they are no tensors of one shape."""
        found = [self.value(node, position, known) for position in range(self.count)]
        if not all(isinstance(each, Tensor) and each.shape == found[0].shape for each in found):
            return None
        return torch.stack(found)


def new_rows(result: fx.Node) -> fx.Node:
    """What a step puts in the place of rows of a cached value, of which this is what it becomes (`step_graph`)."""
    node = result
    while node.target not in (torch.ops.aten.where.self, torch.ops.aten.cat.default):
        (node, *_) = node.all_input_nodes
    joined: Any = node.args if node.target is torch.ops.aten.where.self else node.args[0]
    new, old = joined[1:]
    one_by_one = old.target is torch.ops.aten.where.self
    found: fx.Node = new.args[0] if one_by_one else new
    return found
