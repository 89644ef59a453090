"""Bounds on a graph that comes from a file: looking at it, and running it, takes no more than its model would."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from aero_compile.errors import ArtifactError
from aero_compile.ir.graph_json import NUMBERS
from aero_compile.ir.graph_model import GraphModel
from aero_compile.ir.shapes import node_values, sample_shape

aten = torch.ops.aten

_PARTS = 1 << 16
"""Tensors that one op may give."""

_ELEMENTS = 1 << 27
"""Elements that the values of a graph may have together at the sample shape, besides 32 for each that is stored."""

_LARGEST_NUMBER = 1 << 63
_LARGEST_DEGREE = 16


def check_values(model: GraphModel) -> None:
    """Find the shape of every value at the sample shape, stopping at the first that no decoder has.

    Nothing is computed, and what is found is kept for `node_values`.

    Raises:
        ArtifactError: numbers that grow without need, an op of very many results, or values larger than the stored
            weights give reason for.
    """
    stored = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    limit = _ELEMENTS + 32 * stored
    degrees: dict[fx.Node, int] = {}
    total = 0

    def before(node: fx.Node, values: Mapping[fx.Node, Any]) -> None:
        if node.target in NUMBERS:
            degrees[node] = _degree(node, degrees, values)
        elif node.op == "call_function" and _number_of_parts(node, values) > _PARTS:
            raise ArtifactError(f"{node.name} would have more than {_PARTS} results")

    def after(node: fx.Node, value: Any) -> None:
        nonlocal total
        if isinstance(value, int | float) and abs(value) >= _LARGEST_NUMBER and math.isfinite(value):
            raise ArtifactError(f"{node.name} is the number {value:.3g}, larger than any size")
        if node.op == "call_function":
            parts = value if isinstance(value, tuple | list) else (value,)
            total += sum(part.numel() for part in parts if isinstance(part, Tensor))
        if total > limit:
            raise ArtifactError(f"the values up to {node.name} have {total} elements, more than the weights explain")

    node_values(model, *sample_shape(model), guard=(before, after))


def _degree(node: fx.Node, degrees: Mapping[fx.Node, int], values: Mapping[fx.Node, Any]) -> int:
    """The power of the text's length with which a number computed by Python grows."""
    for argument in (*node.args, *node.kwargs.values()):
        value = values.get(argument) if isinstance(argument, fx.Node) else argument
        if not isinstance(value, int | float | torch.SymInt | torch.SymBool | torch.SymFloat):
            raise ArtifactError(f"{node.name} computes with {type(value).__name__} instead of numbers")
    own = [degrees.get(a, 1) if isinstance(a, fx.Node) else 0 for a in node.args]
    degree = max(own, default=0)
    if node.target is operator.mul:
        degree = sum(own)
    elif node.target is operator.pow:
        exponent = node.args[1]
        if not isinstance(exponent, int | float) or abs(exponent) > _LARGEST_DEGREE:
            raise ArtifactError(f"{node.name} takes a power that is no small number")
        degree = math.ceil(own[0] * max(1, abs(exponent)))
    if degree > _LARGEST_DEGREE:
        raise ArtifactError(f"{node.name} grows with power {degree} of the length")
    return degree


def _number_of_parts(node: fx.Node, values: Mapping[fx.Node, Any]) -> int:
    """How many tensors an op will give, where the sizes of its arguments say so."""
    source = values.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    if not isinstance(source, Tensor):
        return 1
    packet = node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else ""
    if packet in ("unbind", "unbind_copy"):
        return source.shape[_number(node, 1, "dim", 0)]
    if packet in ("split", "split_copy"):
        return source.shape[_number(node, 2, "dim", 0)] // max(1, _number(node, 1, "split_size", 1))
    return _number(node, 1, "chunks", 1) if packet in ("chunk", "tensor_split") else 1


def _number(node: fx.Node, position: int, name: str, default: int) -> int:
    """A literal argument; the default stands for what is no literal number."""
    given = node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
    return given if isinstance(given, int) else default
