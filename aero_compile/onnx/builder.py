"""Makes the FX graph of what depends on the token ids, and knows the shapes of its values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

Array = npt.NDArray[Any]
Value = Any
"""An array, an fx.Node of the live graph, a list of them (ONNX sequences), or None for an input that is left out."""


@dataclass(frozen=True)
class Op:
    """One node of the file that depends on the tokens: what it is called, its attributes, and its inputs' values."""

    kind: str
    domain: str
    version: int
    attributes: Mapping[str, Any]
    inputs: tuple[Value, ...]
    outputs: int
    name: str

    def input(self, number: int) -> Value:
        """The value of an input, None where it is left out."""
        return self.inputs[number] if number < len(self.inputs) else None


class Opaque:
    """An op that the canonical graph has no form for; it goes by its own name and has a known shape."""

    def __init__(self, kind: str, shapes: Sequence[tuple[int, ...]]) -> None:
        self.__name__ = self.kind = kind
        self.shapes = tuple(shapes)

    def __call__(self, *args: Any) -> Any:
        made = tuple(torch.zeros(shape) for shape in self.shapes)
        return made[0] if len(made) == 1 else made

    def __str__(self) -> str:
        return self.kind


class Builder:
    """Makes nodes of the FX graph and knows their shapes."""

    def __init__(self, seq_len: int) -> None:
        self.graph = fx.Graph()
        self.seq_len = seq_len
        self.tensors: dict[str, Tensor] = {}
        self.path = ""
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._values: dict[fx.Node, Any] = {}
        self._constants: dict[int, tuple[Array, fx.Node]] = {}
        self.parameters: dict[int, Array] = {}

    def placeholder(self, shape: tuple[int, int]) -> fx.Node:
        """The token ids."""
        node = self.graph.placeholder("input_ids")
        with self._mode:
            self._values[node] = torch.zeros(shape, dtype=torch.int64)
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A node that calls `target`; arrays among the arguments become constants."""
        args, kwargs = self._nodes(args), self._nodes(kwargs)
        name = getattr(target, "kind", None)
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta["path"] = self.path
        given, named = fx.map_arg((args, kwargs), self._values.__getitem__)
        with self._mode, torch.no_grad():
            self._values[node] = target(*given, **named)
        return node

    def _nodes(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return self.constant(value)
        if isinstance(value, tuple | list):
            return type(value)(self._nodes(each) for each in value)
        if isinstance(value, dict):
            return {key: self._nodes(each) for key, each in value.items()}
        return value

    def constant(self, array: Array) -> fx.Node:
        """A node that reads a buffer with this value, the same for the same array."""
        if id(array) not in self._constants:
            name = f"constant.{len(self._constants)}"
            tensor = self.tensors[name] = _tensor(array)
            node = self.graph.create_node("get_attr", name, (), {})
            self._values[node] = self._mode.from_tensor(tensor, static_shapes=True)
            self._constants[id(array)] = (array, node)
        return self._constants[id(array)][1]

    def value(self, node: fx.Node) -> Any:
        """The fake value of a node."""
        return self._values[node]

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape of an array or a node."""
        return tuple(value.shape) if isinstance(value, np.ndarray) else tuple(self._values[value].shape)

    def is_floating(self, value: Value) -> bool:
        """Whether a value holds floating-point numbers."""
        if isinstance(value, np.ndarray):
            return bool(np.issubdtype(value.dtype, np.floating))
        return bool(self._values[value].is_floating_point())

    def operand(self, value: Value, rank: int) -> Any:
        """`value` as an operand beside one of `rank` dimensions: a number if it is one and no parameter."""
        if (
            isinstance(value, np.ndarray)
            and value.size == 1
            and value.ndim <= rank
            and id(value) not in self.parameters
        ):
            return exact(value)
        return value


def _tensor(array: Array) -> Tensor:
    """The array as a tensor over the same memory."""
    if array.ndim and not any(array.strides):
        return torch.from_numpy(np.array(array.reshape(-1)[:1])).reshape((1,) * array.ndim).expand(array.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a file's weights are read-only, and nothing is going to write to them
        return torch.from_numpy(np.ascontiguousarray(array) if any(s < 0 for s in array.strides) else array)


_FAMILIAR = (0.044715, math.sqrt(2 / math.pi), 0.044715 * math.sqrt(2 / math.pi), math.sqrt(2), math.sqrt(0.5), 1.702)


def exact(value: Array) -> int | float | bool:
    """The number meant by a rounded one-element array: 0.1 for float32(0.1), √2 for float16(1.4142)."""
    number = value.reshape(()).item()
    if not isinstance(number, float) or not math.isfinite(number):
        return number  # type: ignore[no-any-return]
    single = np.float32(number)
    brain = (single.view(np.uint32) & 0xFFFF) == 0 and single == number
    half = number == float(np.float16(number)) if abs(number) < 6e4 else False
    share = 2**-8 if brain else 2**-11 if half else 2**-23
    for familiar in _FAMILIAR:
        if number != 0 and abs(abs(number) - familiar) <= share * familiar and (number * 64) % 1 != 0:
            return math.copysign(familiar, number)
    return float(str(single)) if single == number else number
