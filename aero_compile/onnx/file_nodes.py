"""Inputs, types and nodes of an ONNX file, and which of its nodes need which."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aero_compile.errors import UnsupportedModelError

_TOKEN_NAMES = ("input_ids", "tokens", "token_ids", "idx", "ids", "input", "inputs", "x")
_NOT_TOKENS = re.compile(r"mask|position|segment|type|cache|past|length|total|num_", re.IGNORECASE)
STANDARD = ("", "ai.onnx")


# -- inputs and types ------------------------------------------------------------------------------------------


def numpy_type(code: int) -> Any:
    """The NumPy type that values of an ONNX type are computed with: float32 for every floating-point type."""
    import onnx

    try:
        found = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(code))
    except (KeyError, TypeError, ValueError):
        return np.dtype(np.float32)
    return found if found.kind in "biu" else np.dtype(np.float32)


def is_float_type(code: int) -> bool:
    """Whether an ONNX type is of floating-point numbers, or not known."""
    return code == 0 or numpy_type(code).kind == "f"


def sizes_of(info: Any) -> list[int | str | None]:
    """Sizes of an input: a number, a symbol, or None where neither is given."""
    shape = info.type.tensor_type.shape if info.type.tensor_type.HasField("shape") else None
    if shape is None:
        return [None, None]
    return [d.dim_value if d.HasField("dim_value") and d.dim_value > 0 else d.dim_param or None for d in shape.dim]


def token_input(file: Path, inputs: Sequence[Any]) -> Any:
    """The input that takes the token ids; raises UnsupportedModelError where there is none."""
    import onnx

    integer = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    possible = [i for i in inputs if i.type.tensor_type.elem_type in integer and len(sizes_of(i)) in (1, 2)]
    named = [i for name in _TOKEN_NAMES for i in possible if i.name.lower() == name]
    rest = [i for i in possible if not _NOT_TOKENS.search(i.name) and len(sizes_of(i)) == 2]
    if not named + rest:
        types = {code: name for name, code in onnx.TensorProto.DataType.items()}
        listed = [f"{i.name} {types.get(i.type.tensor_type.elem_type, '?').lower()}{sizes_of(i)}" for i in inputs]
        raise UnsupportedModelError(
            f"{file} takes no token ids: an integer input [batch, sequence] is needed (inputs: "
            f"{', '.join(listed) or 'none'}); supported are decoder-only transformers"
        )
    return (named + rest)[0]


# -- nodes -----------------------------------------------------------------------------------------------------


def described(node: Any) -> str:
    """An op and its name in the file, for messages."""
    domain = f"{node.domain}." if node.domain and node.domain not in STANDARD else ""
    return f"{domain}{node.op_type} {node.name!r}"


def bodies(node: Any) -> Iterator[Any]:
    """The graphs inside a node (If, Loop, Scan)."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def outer_names(node: Any) -> set[str]:
    """Names from outside that the bodies of a node (If, Loop, Scan) read."""
    names: set[str] = set()
    for body in bodies(node):
        own = {each.name for each in [*body.input, *body.initializer]}
        for inner in body.node:
            names |= {name for name in inner.input if name} | outer_names(inner)
            own |= set(inner.output)
        names |= {each.name for each in body.output}
        names -= own
    return names


def reads(node: Any) -> set[str]:
    """Names that a node reads, its bodies included."""
    return {name for name in node.input if name} | outer_names(node)


def needed(nodes: Sequence[Any], names: set[str]) -> list[Any]:
    """The nodes that `names` are computed from, in order."""
    wanted, found = set(names), []
    for node in reversed(list(nodes)):
        if wanted.intersection(node.output):
            found.append(node)
            wanted |= reads(node)
    return found[::-1]


def live_names(nodes: Sequence[Any], names: set[str]) -> set[str]:
    """Names whose value depends on `names`, but for their shapes."""
    live = set(names)
    for node in nodes:
        if node.op_type not in ("Shape", "Size") and live & reads(node):
            live.update(node.output)
    return live


def result_shapes(
    node: Any, version: int, inputs: Mapping[str, tuple[int, Sequence[int]]], values: Mapping[str, Any]
) -> list[tuple[int, ...] | None]:
    """The shapes of a standard op's results as onnx infers them; None for one that it cannot infer.

    `inputs` are the ONNX type and shape of each input, `values` the arrays of those whose values tell shapes.
    """
    import onnx

    types = {name: onnx.helper.make_tensor_type_proto(kind, shape) for name, (kind, shape) in inputs.items()}
    known = {name: onnx.numpy_helper.from_array(array, name) for name, array in values.items()}
    opsets = [onnx.helper.make_opsetid("", version)]
    try:
        schema = onnx.defs.get_schema(node.op_type, version)
        found = onnx.shape_inference.infer_node_outputs(schema, node, types, known, opset_imports=opsets)
    except Exception:  # whatever onnx does not know how to infer
        found = {}
    results = [found.get(name, onnx.TypeProto()).tensor_type for name in node.output]
    return [
        tuple(dim.dim_value for dim in each.shape.dim)
        if each.HasField("shape") and all(dim.HasField("dim_value") for dim in each.shape.dim)
        else None
        for each in results
    ]


def source_path(node: Any) -> str:
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


def inputs_of(proto: Any) -> list[Any]:
    """The inputs of a file that are no weights."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    return [each for each in proto.graph.input if each.name not in weights]
