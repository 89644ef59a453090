"""Write down what the client computes in the clear: the part of a graph that follows from tokens and given weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from aero_compile.errors import LoweringError
from aero_compile.ir.dataflow import ancestors
from aero_compile.ir.ops import of_form
from aero_compile.runtime.lowering.constants import checked_literal, to_numpy
from aero_compile.runtime.lowering.partition import Partition, op_name, place_of
from aero_compile.runtime.lowering.refusals import refuse_huge_weight
from aero_compile.runtime.operators import registry
from aero_compile.runtime.prefix import IDS, LOOKUP, SAME, PrefixStep

_LOOKUPS = of_form("embedding", "index")
_CASTS = of_form("cast")


@dataclass
class Published:
    """The arrays that both parties hold, by their names in the program: given weights, and tables of prefixes."""

    dtype: Any
    arrays: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    _names: dict[object, str] = field(default_factory=dict)

    def add(self, node: fx.Node, tensor: torch.Tensor) -> str:
        """The name of the value of a node, which is one of them from now on."""
        key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype))
        if key not in self._names:
            array = to_numpy(tensor, self.dtype).astype(self.dtype)
            refuse_huge_weight(node, array)
            self._names[key] = f"p:{node.target}" if node.op == "get_attr" else f"p:{node.name}"
            self.arrays[self._names[key]] = array
        return self._names[key]

    def add_table(self, name: str, table: npt.NDArray[Any]) -> str:
        """The name of what follows from the position, [positions, ...]: `name`, or that of an equal table."""
        array = np.ascontiguousarray(table.astype(self.dtype))
        key = hashlib.sha256(f"{array.shape}".encode() + array.tobytes()).hexdigest()
        if key not in self._names:
            self._names[key] = name
            self.arrays[name] = array
        return self._names[key]


def prefix_of(part: Partition, wanted: Sequence[fx.Node], given: Published) -> tuple[PrefixStep, ...]:
    """The steps by which the client computes the nodes `wanted`; what they read is added to `given`.

    Raises:
        LoweringError: a value turns numbers into integers, or does not fit.
    """
    if not wanted:
        return ()
    inside = {node for node in part.graph.nodes if part.is_live(node)}
    needed = ancestors(wanted, inside)
    nodes = [node for node in part.graph.nodes if node in needed and node is not part.tokens]
    return tuple(_step(part, node, given) for node in nodes)


def _step(part: Partition, node: fx.Node, given: Published) -> PrefixStep:
    if part.is_clients(node) and not part.is_float[node]:
        raise LoweringError(
            f"{op_name(node)} (node {node.name}, in {place_of(node)}) turns hidden numbers into integers"
        )
    return PrefixStep(node.name, *_call(part, node, given), part.shapes[node])


def _call(part: Partition, node: fx.Node, given: Published) -> tuple[str, dict[str, Any]]:
    if node.op == "call_module":
        return SAME, {"x": _argument(part, node.args[0], given)}
    if node.target in _CASTS:
        return SAME, {"x": _argument(part, node.args[0], given)}
    if node.target in _LOOKUPS and part.is_clients(node):
        ids = node.args[1]
        (at,) = ids if isinstance(ids, (list, tuple)) else (ids,)
        return LOOKUP, {"table": _argument(part, node.args[0], given), "ids": _argument(part, at, given)}
    bound = registry.bind(node.target, node.args, node.kwargs)
    return op_name(node), {name: _argument(part, value, given) for name, value in bound.items()}


def _argument(part: Partition, value: Any, given: Published) -> Any:
    """An argument as plain data."""
    if isinstance(value, (list, tuple)):
        return [_argument(part, each, given) for each in value]
    if not isinstance(value, fx.Node):
        return checked_literal(value)
    if part.is_live(value):
        return {"of": IDS if value is part.tokens else value.name}
    if part.positions is not None and part.positions.decide(value):
        raise LoweringError(
            f"{op_name(value)} (node {value.name}, in {place_of(value)}) is given to clients and follows from the "
            "position, which no step for all positions can take: leave it out of public="
        )
    known = part.known[value]
    if isinstance(known, torch.Tensor):
        return {"of": given.add(value, known)}
    return _argument(part, known, given)
