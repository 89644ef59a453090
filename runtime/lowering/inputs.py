"""What the steps of a program read: values of other steps, weights of the server, arrays that both parties hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from aero_compile.errors import LoweringError
from aero_compile.ir.ownership import Domain
from aero_compile.runtime.lowering import other_weights
from aero_compile.runtime.lowering.constants import checked_literal, to_numpy
from aero_compile.runtime.lowering.live import Ref
from aero_compile.runtime.lowering.masks import Masked
from aero_compile.runtime.lowering.partition import Partition, op_name, place_of
from aero_compile.runtime.lowering.prefix import Published
from aero_compile.runtime.lowering.refusals import refuse_huge_table, refuse_huge_weight
from aero_compile.runtime.lowering.schedule import Schedule
from aero_compile.runtime.operators import registry
from aero_compile.runtime.program_parts import TOKENS


@dataclass
class Slot:
    """What one step knows about its inputs while it is being assembled."""

    nodes: list[fx.Node] = field(default_factory=list)
    inputs: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)


@dataclass
class Inputs:
    """Collects the inputs of the steps of a schedule, in `dtype`; of those `by_position` there are values for all."""

    schedule: Schedule
    dtype: Any
    weights: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    by_position: set[str] = field(default_factory=set)
    published: Published = field(init=False)
    _weight_names: dict[object, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.published = Published(self.dtype)

    @property
    def part(self) -> Partition:
        return self.schedule.part

    def argument(self, slot: Slot, value: Any) -> Any:
        """Turn a node argument into a reference to a value of the step, a constant, or a literal."""
        if isinstance(value, (list, tuple)):
            return [self.argument(slot, each) for each in value]
        if not isinstance(value, fx.Node):
            return checked_literal(value)
        if self.part.is_live(value):
            name = TOKENS if value is self.part.tokens else value.name
            if value not in slot.nodes:
                slot.inputs.setdefault(name, self._shape_and_kind(value))
            return Ref(name)
        if self.part.positions is not None and self.part.positions.decide(value):
            return self._table(slot, value)
        known = self.part.known[value]
        owned = self.part.domains[value] in (Domain.SERVER, Domain.PUBLISHED)
        if owned and not isinstance(known, torch.Tensor):
            raise unsupported(value, "it makes a Python value of weights, which would be public")
        if not isinstance(known, torch.Tensor):
            return self.argument(slot, known) if isinstance(known, (list, tuple)) else known
        array = to_numpy(known, self.dtype)
        if not array.size:
            return array  # without an element there is nothing to hide, nor to send
        if self.part.domains[value] is Domain.PUBLISHED:
            name = self.published.add(value, known)
            slot.inputs.setdefault(name, (array.shape, np.dtype(self.dtype).name))
            return Ref(name)
        if owned:
            # SPU's inputs of the server are numbers, flags and counts too.
            array = array.astype(self.dtype, copy=False)
            name = self._weight(value, known, array)
            slot.inputs.setdefault(name, (array.shape, array.dtype.name))
            return Ref(name)
        refuse_huge_table(value, array)
        return array

    def _shape_and_kind(self, node: fx.Node) -> tuple[tuple[int, ...], str]:
        shape = self.part.shapes[node]
        if self.schedule.is_tokens(node):
            return (*shape, self.schedule.vocabulary), "int32"
        return shape, np.dtype(self.dtype).name if self.part.is_float[node] else "bool"

    def _weight(self, node: fx.Node, tensor: torch.Tensor, array: npt.NDArray[Any]) -> str:
        refuse_huge_weight(node, array)
        key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype))
        name = self._weight_names.setdefault(key, f"w:{node.target}" if node.op == "get_attr" else f"w:{node.name}")
        self.weights[name] = array
        return name

    def mask_tables(self, slot: Slot, node: fx.Node, mask: Masked, dim: int) -> list[Ref | None]:
        """The inputs of a mask that follows from the position; none of any other."""
        if mask.tables is None:
            return []
        if dim != len(self.part.shapes[node]) - 1:
            raise unsupported(node, "its mask follows from the position, and its rows do not lie along the last axis")
        given = mask.tables
        tables: dict[str, Any] = {"added": given.bias, "allowed": given.allowed, "own": given.own}
        form = None if op_name(node) in ("aten.softmax", "unnormalized_softmax") else other_weights.form_of(node)
        if form is not None and form.kind != "sink":
            added = other_weights.position_biases(given.bias, given.allowed, form)
            tables = {"added": added, "allowed": other_weights.position_tables(given.allowed, form), "own": None}
        return [
            None if table is None else self._at_position(slot, self.published.add_table(f"p:{node.name}:{name}", table))
            for name, table in tables.items()
        ]

    def _at_position(self, slot: Slot, name: str) -> Ref:
        """An input of which there is a value for each position."""
        table = self.published.arrays[name] if name in self.published.arrays else self.weights[name]
        self.by_position.add(name)
        slot.inputs.setdefault(name, (table.shape[1:], table.dtype.name))
        return Ref(name)

    def _table(self, slot: Slot, node: fx.Node) -> Ref:
        """The input for a value that follows from the position."""
        positions = self.part.positions
        table = None if positions is None else positions.table(node, self.part.known)
        if table is None:
            raise unsupported(node, "it follows from the position, and is no tensor of one shape for all positions")
        array = to_numpy(table, self.dtype).astype(self.dtype)
        if self.part.domains[node] is not Domain.SERVER:
            refuse_huge_table(node, array)
            return self._at_position(slot, self.published.add_table(f"p:{node.name}", array))
        refuse_huge_weight(node, array)
        self.weights[f"w:{node.name}"] = array
        return self._at_position(slot, f"w:{node.name}")


def unsupported(node: fx.Node, reason: str) -> LoweringError:
    """The error of a node that cannot be lowered, with its place in the model."""
    return LoweringError(
        f"cannot run {op_name(node)} (node {node.name}, in {place_of(node)}) privately: {reason}. "
        f"Supported: {', '.join(registry.supported_ops())}"
    )
