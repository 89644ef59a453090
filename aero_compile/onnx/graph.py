"""Read a decoder from an ONNX file, of any exporter, as a graph of ATen ops for one shape of the tokens.

The nodes of the file are visited in order. A value that does not depend on the token ids is computed at once, with the
reference implementation of onnx, and is a NumPy array from then on: masks, positions, rotary tables, and all the
arithmetic on shapes that exporters leave in a file. What depends on the token ids becomes nodes of an FX graph
(`ops`, `moves`, `fused`), whose shapes are known, so that they answer `Shape`.

Large weights are replaced by zeros that take no memory: nothing that is found from a graph depends on their values.
"""

from __future__ import annotations

import ast
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from aero_compile.capturing.canonicalize import canonicalize
from aero_compile.errors import AeroError, InputError, UnsupportedModelError
from aero_compile.graphs.convention import CallConvention
from aero_compile.graphs.trainable import TransformedModel
from aero_compile.quiet import quiet

Array = npt.NDArray[Any]
Value = Any
"""An array, an fx.Node of the live graph, a list of them (ONNX sequences), or None for an input that is left out."""

LARGEST_READ = 1 << 22
"""Floating-point weights of more elements are not read from the file."""

_TOKEN_NAMES = ("input_ids", "tokens", "token_ids", "idx", "ids", "input", "inputs", "x")
_NOT_TOKENS = re.compile(r"mask|position|segment|type|cache|past|length|total|num_", re.IGNORECASE)
_CACHES = re.compile(r"past|cache|key|value|state|mem", re.IGNORECASE)
_MICROSOFT = "com.microsoft"
_STANDARD = ("", "ai.onnx")


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


# -- from file to model ----------------------------------------------------------------------------------------


def read_decoder(path: str | os.PathLike[str], seq_len: int) -> TransformedModel:
    """A canonical model for tokens `[B, seq_len]` (B as the file says, else 1), fit for looking at, not for running.

    Raises:
        InputError: no such file, a damaged one, or one that cannot take `seq_len` tokens.
        UnsupportedModelError: the file holds no decoder that maps token ids to logits.
    """
    file = Path(path)
    proto = _load(file)
    noted = {entry.key: entry.value for entry in proto.metadata_props}.get("aero_compile.max_positions", "")
    if noted.isdecimal() and seq_len > int(noted):
        raise InputError(f"{file} takes sequences of at most {noted} tokens, not {seq_len}")
    try:
        return _convert(proto, file, seq_len)
    except InputError:
        raise
    except AeroError as error:
        shorter = next((n for n in (8, 2) if n < seq_len), None)
        if shorter is None or _fails(proto, file, shorter):
            raise
        raise InputError(f"{file} cannot take sequences of {seq_len} tokens: {error}") from error


def _fails(proto: Any, file: Path, seq_len: int) -> bool:
    try:
        _convert(proto, file, seq_len)
    except AeroError:
        return True
    return False


def _load(file: Path) -> Any:
    try:
        import onnx
        import onnx.inliner
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise InputError(f"reading ONNX needs {error.name}, not installed: pip install 'aero-compile[onnx]'") from error
    try:
        proto = onnx.load_model_from_string(file.read_bytes())
    except FileNotFoundError as error:
        raise InputError(f"{file}: no such file") from error
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from error
    except (DecodeError, ValueError) as error:
        raise InputError(f"{file} is no ONNX file, or damaged: {error}") from error
    if not proto.graph.node or not proto.graph.output:
        raise InputError(f"{file} is no ONNX file, or damaged: it holds {len(proto.graph.node)} nodes")
    try:
        return onnx.inliner.inline_local_functions(proto) if proto.functions else proto
    except Exception as error:
        raise InputError(f"{file} is damaged: its functions cannot be inlined: {_first_line(error)}") from error


def _convert(proto: Any, file: Path, seq_len: int) -> TransformedModel:
    try:
        with quiet(["torch._subclasses.fake_tensor"], logging.CRITICAL):  # shapes that do not fit are an error of ours
            return _converted(proto, file, seq_len)
    except AeroError:
        raise
    except Exception as error:  # whatever a damaged file can lead to
        raise InputError(f"{file} is damaged: {type(error).__name__}: {_first_line(error)}") from error


def _converted(proto: Any, file: Path, seq_len: int) -> TransformedModel:
    importer = _Importer(proto, file, seq_len)
    logits = importer.run()
    builder = importer.builder
    builder.graph.output((logits,))
    convention = CallConvention(
        family=file.name, arguments=("input_ids",), tokens="input_ids", output={"kind": "tensor", "index": 0}
    )
    model = TransformedModel(builder.graph, builder.tensors, {}, convention)
    model.fixed_shape = importer.token_shape
    canonicalize(model)
    _ = model.structure
    return model


class _Importer:
    """Visits the nodes of a file."""

    def __init__(self, proto: Any, file: Path, seq_len: int) -> None:
        self.proto, self.file = proto, file
        self.opsets = {entry.domain: entry.version for entry in proto.opset_import}
        self.builder = Builder(seq_len)
        self.initializers = {tensor.name: tensor for tensor in proto.graph.initializer}
        if proto.graph.sparse_initializer:
            raise UnsupportedModelError(f"{file} keeps weights as sparse tensors, which are not supported")
        inputs = [each for each in proto.graph.input if each.name not in self.initializers]
        tokens = _token_input(file, inputs)
        dims = _dims(tokens)
        batch, length = (None, *dims)[-2:] if dims else (None, None)
        if isinstance(length, int) and length != seq_len:
            raise InputError(f"{file} takes exactly {length} tokens, not {seq_len}: give seq_len={length}")
        self.token_shape = (batch if isinstance(batch, int) else 1, seq_len)
        self.symbols: dict[str, int] = {}
        for dim, size in zip((batch, length), self.token_shape, strict=True):
            if isinstance(dim, str):
                self.symbols[dim] = size
        self.env: dict[str, Value] = {"": None}
        node = self.builder.placeholder(self.token_shape)
        if len(dims) == 1:
            node = self.builder.call(torch.ops.aten.reshape.default, node, [seq_len])
        self.env[tokens.name] = node
        for each in inputs:
            if each is not tokens:
                self.env[each.name] = self._made_up(each)

    # -- inputs and weights -------------------------------------------------------------------------------------

    def _made_up(self, info: Any) -> Array:
        """A value for an input other than the tokens: all is visible, nothing is cached."""
        dtype = _numpy_type(info.type.tensor_type.elem_type)
        batch, length = self.token_shape
        name, dims = info.name, _dims(info)
        floating = np.issubdtype(dtype, np.floating)
        cached = len(dims) >= 3 and bool(_CACHES.search(name)) and "mask" not in name
        shape = [self._size(dim, number, name, cached) for number, dim in enumerate(dims)]
        if math.prod(shape) > 1 << 30:
            raise UnsupportedModelError(f"the input {name} of {self.file} has the shape {shape}")
        if "mask" in name and len(shape) >= 3:
            seen = np.tri(length, dtype=bool)
            mask = np.where(seen, 0.0, -1e4).astype(dtype) if floating else seen.astype(dtype)
            return np.broadcast_to(mask, (*(batch if i == 0 else 1 for i in range(len(shape) - 2)), length, length))
        if "mask" in name:
            return np.ones(shape, dtype)
        if "position" in name and not floating and shape:
            return np.broadcast_to(np.arange(length, dtype=dtype), (*shape[:-1], length))
        if "total_seq" in name or "seqlens_k" in name:
            return np.full(shape, length - ("seqlens_k" in name), dtype)
        return np.zeros(shape, dtype)

    def _size(self, dim: int | str | None, number: int, name: str, cached: bool) -> int:
        batch, length = self.token_shape
        if isinstance(dim, int):
            return dim
        if dim in self.symbols:
            return self.symbols[dim]
        if number == 0:
            return batch
        if cached or (isinstance(dim, str) and re.fullmatch(r"past\w*", dim)):
            return 0
        return length if number == 1 else 1

    def _initializer(self, name: str) -> Array:
        import onnx

        tensor = self.initializers[name]
        shape = tuple(tensor.dims)
        if any(size < 0 for size in shape):
            raise InputError(f"{self.file} is damaged: the weight {name} has the shape {list(shape)}")
        dtype = _numpy_type(tensor.data_type)
        self._check_stored(tensor)
        if np.issubdtype(dtype, np.floating) and math.prod(shape) > LARGEST_READ:
            array: Array = np.broadcast_to(np.float32(0), shape)
        else:
            try:
                array = _single(onnx.numpy_helper.to_array(tensor, os.fspath(self.file.parent)))
            except Exception as error:
                raise InputError(f"{self.file} is damaged: the weight {name} cannot be read: {error}") from error
        if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", name):
            self.builder.parameters[id(array)] = array
        return array

    def _check_stored(self, tensor: Any) -> None:
        """Raise InputError if the weight is kept in another file that is missing or too short."""
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if tensor.data_location == 1:
            location = self.file.parent / entries.get("location", "")
            try:
                size = location.stat().st_size
            except OSError as error:
                raise InputError(f"{self.file} keeps its weights in {location}: {error.strerror}") from error
            if int(entries.get("offset", 0)) + int(entries.get("length", 0)) > size:
                raise InputError(f"{location} is damaged: it ends before the weight {tensor.name}")

    def value(self, name: str) -> Value:
        """The value of a name of the file."""
        if name not in self.env:
            if name not in self.initializers:
                raise InputError(f"{self.file} is damaged: nothing makes the value {name!r}")
            self.env[name] = self._initializer(name)
        return self.env[name]

    # -- nodes --------------------------------------------------------------------------------------------------

    def run(self) -> fx.Node:
        """Visit what the logits need; returns their node."""
        graph = self.proto.graph
        live = _live_names(graph.node, {name for name, value in self.env.items() if isinstance(value, fx.Node)})
        types = {each.name: each.type.tensor_type.elem_type for each in graph.output}
        found = [name for name in types if name in live and _is_float_type(types[name])]
        preferred = [name for name in found if "logit" in name.lower()] or found
        if not preferred:
            raise UnsupportedModelError(
                f"no output of {self.file} is computed from its token ids as floating-point logits (outputs: "
                f"{', '.join(types)})"
            )
        self.visit(_needed(graph.node, {preferred[0]}))
        result = self.value(preferred[0])
        if not isinstance(result, fx.Node):
            raise UnsupportedModelError(f"the output {preferred[0]} of {self.file} does not depend on its token ids")
        return result

    def visit(self, nodes: Iterable[Any]) -> None:
        """Compute nodes, or add them to the graph."""
        for node in nodes:
            inputs = [self.value(name) for name in node.input]
            self.builder.path = _source_path(node)
            results = self._results(node, inputs)
            for name, result in zip(node.output, results, strict=False):
                if name:
                    self.env[name] = result

    def _results(self, node: Any, inputs: Sequence[Value]) -> Sequence[Value]:
        if node.op_type == "If" and isinstance(inputs[0], np.ndarray):
            return self._branch(node, bool(inputs[0].reshape(-1)[0]))
        if node.op_type in ("Shape", "Size") and isinstance(inputs[0], fx.Node):
            inputs = [np.broadcast_to(np.float32(0), self.builder.shape(inputs[0]))]
        outer = [self.value(name) for name in sorted(_captured(node))]
        if any(_is_live(value) for value in [*inputs, *outer]):
            return self._live(node, inputs)
        if any(isinstance(value, list) for value in inputs) or node.op_type.startswith(("Sequence", "SplitToSeq")):
            return self._live(node, inputs)
        return [_single(value) for value in self._constant(node, inputs)]

    def _branch(self, node: Any, condition: bool) -> Sequence[Value]:
        chosen = "then_branch" if condition else "else_branch"
        body = next(attribute.g for attribute in node.attribute if attribute.name == chosen)
        self.initializers |= {tensor.name: tensor for tensor in body.initializer}
        names = [output.name for output in body.output]
        self.visit(_needed(body.node, set(names)))
        return [self.value(name) for name in names]

    def _constant(self, node: Any, inputs: Sequence[Value]) -> Sequence[Any]:
        """Run one node that depends on no token."""
        import onnx

        captured = sorted(_captured(node))
        feeds = {name: value for name, value in zip(node.input, inputs, strict=True) if name}
        feeds |= {name: self.value(name) for name in captured}
        infos = [onnx.ValueInfoProto(name=name) for name in feeds]
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        graph = onnx.helper.make_graph([node], "one", infos, outputs)
        model = onnx.helper.make_model(graph, opset_imports=self.proto.opset_import)
        try:
            results = iter(_first_that_works(model, feeds))
        except Exception as error:
            shapes = [list(np.shape(value)) for value in feeds.values()]
            raise UnsupportedModelError(
                f"{_described(node)} in {self.file.name} cannot be computed for inputs of shape {shapes}: "
                f"{_first_line(error)}"
            ) from error
        return [next(results) if name else None for name in node.output]

    def _live(self, node: Any, inputs: Sequence[Value]) -> Sequence[Value]:
        """Add one node that depends on the tokens."""
        import onnx

        from aero_compile.onnx.fused import FUSED
        from aero_compile.onnx.ops import OPS, opaque

        domain = "" if node.domain in _STANDARD else node.domain
        attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        attributes = {k: v.decode() if isinstance(v, bytes) else v for k, v in attributes.items()}
        version = self.opsets.get(node.domain, self.opsets.get(domain, 1))
        op = Op(node.op_type, domain, version, attributes, tuple(inputs), len(node.output), _described(node))
        convert = FUSED.get((domain, node.op_type)) or OPS.get(node.op_type)
        if any(_bodies(node)):
            raise UnsupportedModelError(
                f"{_described(node)} in {self.file.name} depends on the token ids; loops and branches over tokens are "
                "not supported"
            )
        try:
            return convert(self.builder, op) if convert is not None else opaque(self.builder, op, node)
        except AeroError:
            raise
        except Exception as error:
            shapes = [None if v is None else list(self.builder.shape(v)) for v in inputs if not isinstance(v, list)]
            raise UnsupportedModelError(
                f"{_described(node)} in {self.file.name} cannot be read for inputs of shape {shapes}: "
                f"{_first_line(error)}"
            ) from error


def _first_that_works(model: Any, feeds: Mapping[str, Array]) -> Sequence[Any]:
    """What a model of one node computes, by the reference implementation or, where that has none, by onnxruntime."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    try:
        evaluator: Any = ReferenceEvaluator(model)
        return list(evaluator.run(None, dict(feeds)))
    except Exception:
        try:
            import onnxruntime
        except ImportError:
            onnxruntime = None
        if onnxruntime is None:
            raise
    for info in model.graph.input:
        array = feeds[info.name]
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        info.CopyFrom(onnx.helper.make_tensor_value_info(info.name, kind, array.shape))
    model.ir_version = min(model.ir_version, 10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _is_live(value: Value) -> bool:
    return isinstance(value, fx.Node) or (isinstance(value, list) and any(_is_live(each) for each in value))


def _described(node: Any) -> str:
    domain = f"{node.domain}." if node.domain and node.domain not in _STANDARD else ""
    return f"{domain}{node.op_type} {node.name!r}"


def _single(value: Any) -> Any:
    """The same in float32, whatever floating-point type it has: half precision is not what is looked at."""
    if isinstance(value, list):
        return [_single(each) for each in value]
    array = np.asarray(value)
    known = array.dtype.kind in "biu" or array.dtype == np.float32
    return array if known else array.astype(np.float32)


def _numpy_type(code: int) -> Any:
    import onnx

    try:
        found = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(code))
    except (KeyError, TypeError, ValueError):
        return np.dtype(np.float32)
    return found if found.kind in "biu" else np.dtype(np.float32)


def _is_float_type(code: int) -> bool:
    return code == 0 or _numpy_type(code).kind == "f"


def _dims(info: Any) -> list[int | str | None]:
    """Sizes of an input: a number, a symbol, or None where neither is given."""
    shape = info.type.tensor_type.shape if info.type.tensor_type.HasField("shape") else None
    if shape is None:
        return [None, None]
    return [d.dim_value if d.HasField("dim_value") and d.dim_value > 0 else d.dim_param or None for d in shape.dim]


def _token_input(file: Path, inputs: Sequence[Any]) -> Any:
    import onnx

    integer = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    possible = [i for i in inputs if i.type.tensor_type.elem_type in integer and len(_dims(i)) in (1, 2)]
    named = [i for name in _TOKEN_NAMES for i in possible if i.name.lower() == name]
    rest = [i for i in possible if not _NOT_TOKENS.search(i.name) and len(_dims(i)) == 2]
    if not named + rest:
        types = {code: name for name, code in onnx.TensorProto.DataType.items()}
        listed = [f"{i.name} {types.get(i.type.tensor_type.elem_type, '?').lower()}{_dims(i)}" for i in inputs]
        raise UnsupportedModelError(
            f"{file} takes no token ids: an integer input [batch, sequence] is needed (inputs: "
            f"{', '.join(listed) or 'none'}); supported are decoder-only transformers"
        )
    return (named + rest)[0]


# -- the file's graph ------------------------------------------------------------------------------------------


def _bodies(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _captured(node: Any) -> set[str]:
    """Names from outside that the bodies of a node (If, Loop, Scan) read."""
    names: set[str] = set()
    for body in _bodies(node):
        own = {each.name for each in [*body.input, *body.initializer]}
        for inner in body.node:
            names |= {name for name in inner.input if name} | _captured(inner)
            own |= set(inner.output)
        names |= {each.name for each in body.output}
        names -= own
    return names


def _reads(node: Any) -> set[str]:
    return {name for name in node.input if name} | _captured(node)


def _needed(nodes: Sequence[Any], names: set[str]) -> list[Any]:
    """The nodes that `names` are computed from, in order."""
    wanted, found = set(names), []
    for node in reversed(list(nodes)):
        if wanted.intersection(node.output):
            found.append(node)
            wanted |= _reads(node)
    return found[::-1]


def _live_names(nodes: Sequence[Any], names: set[str]) -> set[str]:
    """Names whose value depends on `names`, but for their shapes."""
    live = set(names)
    for node in nodes:
        if node.op_type not in ("Shape", "Size") and live & _reads(node):
            live.update(node.output)
    return live


def _source_path(node: Any) -> str:
    """The module that a node comes from, as far as the exporter noted it: `transformer.h.3.attn`."""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            try:
                scopes = ast.literal_eval(entry.value)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                return ""
            return str(scopes[-2]) if isinstance(scopes, list) and len(scopes) > 1 else ""
    if node.name.startswith("/"):  # what torch's older exporter writes: /transformer/h.3/attn/MatMul_1
        return ".".join(node.name.strip("/").split("/")[:-1])
    return ""
