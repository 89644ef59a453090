"""The modules that a graph may hold, by name: what an artifact can describe, and build again without foreign code.

Each maps one tensor to another of the same shape and dtype. Hidden values go through dropout alone, which is the
identity at inference; the others compute weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from aero_compile.errors import ArtifactError
from aero_compile.ir.shared_dropout import SharedDropout
from aero_compile.ir.spectral import SpectralNorm

_KINDS: Mapping[str, tuple[type[nn.Module], Mapping[str, type]]] = {
    "dropout": (nn.Dropout, {"p": float}),
    "shared_dropout": (SharedDropout, {"p": float, "axes": list}),
    "spectral_norm": (SpectralNorm, {"rows": int, "columns": int, "n_power_iterations": int}),
}
"""Name → class, and the attributes, which are arguments of its constructor, with their types."""


_LARGEST = {"rows": 1 << 31, "columns": 1 << 31, "n_power_iterations": 1000}


def kind_of(module: nn.Module) -> str | None:
    """Name of the kind of `module`, or None if no graph may hold it."""
    return next((kind for kind, (cls, _) in _KINDS.items() if type(module) is cls), None)


def describe_module(module: nn.Module) -> dict[str, Any]:
    """The module as JSON values, without its tensors.

    Raises:
        ArtifactError: no graph may hold such a module.
    """
    kind = kind_of(module)
    if kind is None:
        raise ArtifactError(f"a graph cannot hold a {type(module).__name__}")
    return {"kind": kind} | {name: of(getattr(module, name)) for name, of in _KINDS[kind][1].items()}


def build_module(record: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> nn.Module:
    """The module that `describe_module` described, with its tensors.

    Raises:
        ArtifactError: unknown kind, a wrong or missing option, or tensors that are not those of the module.
    """
    kind = str(record.get("kind"))
    if kind not in _KINDS:
        raise ArtifactError(f"unknown kind of module {kind!r}; a graph may hold {', '.join(_KINDS)}")
    cls, options = _KINDS[kind]
    values = {name: record.get(name) for name in options}
    for name, of in options.items():
        if isinstance(values[name], bool) or not isinstance(values[name], (of, int)):
            raise ArtifactError(f"{kind} with {name}={values[name]!r}")
        largest = _LARGEST.get(name)
        if largest is not None and not 0 < cast("int", values[name]) <= largest:
            raise ArtifactError(f"{kind} with {name}={values[name]!r}")
    with torch.device("meta"):
        module = cls(**values)
    expected = {name: tuple(buffer.shape) for name, buffer in module.named_buffers()}
    found = {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    if found != expected:
        raise ArtifactError(f"{kind} has tensors {found} instead of {expected}")
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module
