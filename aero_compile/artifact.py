"""Saved models: weights as safetensors, the graph as JSON. Nothing that is loaded is executed or unpickled.

A directory holds `model.safetensors` and `aero_compile.json` (format version, graph, calling convention, recipe,
census, versions, provenance, and the SHA-256 of the weights).
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from aero_compile.convention import CallConvention
from aero_compile.errors import ArtifactError
from aero_compile.trainable import TransformedModel
from aero_compile.version import __version__

FORMAT = 1
"""Version of the artifact's layout; a newer one is refused."""

GRAPH_FILE, WEIGHTS_FILE = "aero_compile.json", "model.safetensors"

_ON_NUMBERS = ["add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow", "getitem"]
_ON_NUMBERS += ["eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_"]
_SYMBOLIC = ["sym_max", "sym_min", "sym_not", "sym_int", "sym_ite"]
_PLAIN: dict[str, Callable[..., Any]] = {f"operator.{name}": getattr(operator, name) for name in _ON_NUMBERS}
_PLAIN |= {f"torch.{name}": getattr(torch, name) for name in _SYMBOLIC}
_NAMES = {function: name for name, function in _PLAIN.items()}


def save(model: TransformedModel, directory: str | os.PathLike[str], *, provenance: Any = None) -> Path:
    """Write `model` to `directory`, replacing an artifact that is there; other files are left alone.

    Args:
        model: the transformed model.
        directory: where to write; made if it does not exist.
        provenance: JSON-able notes on how it was made (config, seed, data, metrics).

    Returns:
        The directory.

    Raises:
        ArtifactError: the model's weights are on the meta device, or its graph holds an op without a name.
    """
    from safetensors.torch import save as to_bytes

    if not isinstance(model, TransformedModel):
        raise ArtifactError(f"only a transformed model can be saved, not a {type(model).__name__}")
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    tensors = model.state_dict()
    if any(tensor.device.type == "meta" for tensor in tensors.values()):
        raise ArtifactError("the model has no weights (meta device) and cannot be saved")
    buffers = dict(model.named_buffers(remove_duplicate=False))
    extra = {name: tensor for name, tensor in buffers.items() if name not in tensors}
    unique, aliases = _without_ties(tensors | extra)
    weights = to_bytes({name: tensor.detach().cpu().contiguous() for name, tensor in unique.items()})
    document = {
        "format": FORMAT,
        "sha256": hashlib.sha256(weights).hexdigest(),
        "recipe": model.recipe,
        "history": list(model.history),
        "max_positions": model.max_positions,
        "convention": vars(model.convention),
        "census": _census_text(model),
        "tied": aliases,
        "parameters": {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)},
        "non_persistent": sorted(extra),
        "dropouts": {name: m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout)},
        "graph": [_encode_node(node) for node in model.graph.nodes],
        "versions": {
            "aero_compile": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "provenance": provenance,
    }
    _write(path / WEIGHTS_FILE, weights)
    _write(path / GRAPH_FILE, json.dumps(document, indent=1, ensure_ascii=False).encode())
    return path


def load(directory: str | os.PathLike[str]) -> TransformedModel:
    """Read a model that `save` wrote. It needs neither the source's class nor its library.

    Raises:
        ArtifactError: missing, foreign, damaged, truncated, or written by a newer version.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    path = Path(directory)
    document = read_document(path)
    try:
        weights = (path / WEIGHTS_FILE).read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path} has no readable {WEIGHTS_FILE}: {error.strerror}") from error
    if hashlib.sha256(weights).hexdigest() != document.get("sha256"):
        raise ArtifactError(f"{path / WEIGHTS_FILE} is damaged or does not belong to {GRAPH_FILE} beside it")
    try:
        tensors: dict[str, Tensor] = from_bytes(weights)
        tensors = {
            name: nn.Parameter(tensor, requires_grad=document["parameters"][name])
            if name in document["parameters"]
            else tensor
            for name, tensor in tensors.items()
        }
        tensors |= {alias: tensors[name] for alias, name in document["tied"].items()}
        convention = CallConvention(
            **(document["convention"] | {"arguments": tuple(document["convention"]["arguments"])})
        )
        model = TransformedModel(
            _decode_graph(document["graph"]),
            tensors,
            document["dropouts"],
            convention,
            non_persistent=frozenset(document["non_persistent"]),
            max_positions=document["max_positions"],
            history=tuple(document["history"]),
        )
    except ArtifactError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, SafetensorError) as error:
        raise ArtifactError(f"{path / GRAPH_FILE} is damaged: {type(error).__name__}: {error}") from error
    from aero_compile.canonicalize import mark_constants

    mark_constants(model)
    return model.eval()


def read_document(directory: Path) -> dict[str, Any]:
    """The JSON part of an artifact, checked for its format.

    Raises:
        ArtifactError: missing, foreign, damaged, or newer.
    """
    file = directory / GRAPH_FILE
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ArtifactError(f"{directory} is no aero_compile artifact: it has no {GRAPH_FILE}") from error
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{file} is damaged: {error}") from error
    version = document.get("format") if isinstance(document, dict) else None
    if not isinstance(version, int):
        raise ArtifactError(f"{file} was not written by aero_compile")
    if version > FORMAT:
        raise ArtifactError(f"{file} has format {version}, newer than {FORMAT}: upgrade aero_compile")
    return document  # type: ignore[no-any-return]


def _census_text(model: TransformedModel) -> str:
    from aero_compile.census import census

    return str(census(model, min(128, model.max_positions or 128)))


def _without_ties(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    first: dict[tuple[int, tuple[int, ...], torch.dtype], str] = {}
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr() if tensor.numel() else id(tensor), tuple(tensor.shape), tensor.dtype)
        if key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            unique[name] = tensor
    return unique, aliases


def _write(path: Path, content: bytes) -> None:
    """Write to a temporary name and rename, so that a crash leaves the old file."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


# -- the graph as JSON --------------------------------------------------------------------------------------


def _encode_node(node: fx.Node) -> dict[str, Any]:
    from aero_compile.rewriting import source_path

    record: dict[str, Any] = {"name": node.name, "op": node.op, "target": _encode_target(node)}
    if node.args:
        record["args"] = _encode(node.args)
    if node.kwargs:
        record["kwargs"] = _encode(dict(node.kwargs))
    if source_path(node):
        record["path"] = source_path(node)
    return record


def _encode_target(node: fx.Node) -> str:
    if node.op != "call_function":
        return str(node.target)
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    name = _NAMES.get(node.target) if callable(node.target) else None
    if name is None:
        raise ArtifactError(f"node {node.name} calls {node.target}, which has no name in an artifact")
    return name


_TYPES = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def _encode(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, tuple | list):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": {key: _encode(item) for key, item in value.items()}}
    if isinstance(value, slice):
        return {"slice": [_encode(part) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return {"float": repr(value)}
    if isinstance(value, _TYPES):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ArtifactError(f"an argument of type {type(value).__name__} cannot be saved")


def _decode(value: Any, nodes: dict[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "node":
        return nodes[inner]
    if kind == "dict":
        return {key: _decode(item, nodes) for key, item in inner.items()}
    if kind == "slice":
        return slice(*(_decode(part, nodes) for part in inner))
    if kind == "float":
        return float(inner)
    if kind == "device":
        return torch.device("cpu")  # where the weights are loaded to
    if kind in ("dtype", "layout", "memory_format"):
        found = getattr(torch, inner)
        if isinstance(found, _TYPES):
            return found
    raise ArtifactError(f"unknown value {kind}={inner!r} in the graph")


def _decode_graph(records: list[dict[str, Any]]) -> fx.Graph:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for record in records:
        args = tuple(_decode(record.get("args", []), nodes))
        kwargs = _decode(record.get("kwargs", {"dict": {}}), nodes)
        op, name = record["op"], record["name"]
        if op not in ("placeholder", "get_attr", "call_function", "call_module", "output"):
            raise ArtifactError(f"unknown kind of node {op!r} in the graph")
        target = _decode_target(record["target"]) if op == "call_function" else record["target"]
        if op == "output":
            args = (tuple(args[0]),)
        node = graph.create_node(op, target, args, kwargs, name=name)
        if "path" in record:
            node.meta["path"] = record["path"]
        nodes[name] = node
    graph.lint()
    return graph


def _decode_target(text: str) -> Any:
    """Only ATen ops and a few functions on numbers: a file cannot name anything else to be called."""
    if text in _PLAIN:
        return _PLAIN[text]
    namespace, *path = text.split(".")
    if namespace != "aten" or len(path) != 2:
        raise ArtifactError(f"the graph calls {text!r}, which is not allowed in an artifact")
    try:
        return getattr(getattr(torch.ops.aten, path[0]), path[1])
    except AttributeError as error:
        raise ArtifactError(f"this torch has no op {text!r}; upgrade torch") from error
