"""The table of live operators that the runtime can execute: ATen name -> JAX function.

A function takes the arguments of the ATen schema by name (`self` is called `x`), with live tensors as
JAX arrays, server tensors as JAX arrays (inputs of the program) and public tensors as NumPy arrays.
`exact=True` selects the textbook function instead of the fixed-point form where the two differ; the
structure of the computation is the same. The functions are in `products`, `pointwise` and `views`.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Operator = Callable[..., Any]
_OPS: dict[str, Operator] = {}
_NOT_ATEN = ("deviation_norm",)


def supported_ops() -> tuple[str, ...]:
    """Return the names of all live operators that can be lowered, sorted."""
    return tuple(sorted({*_OPS, "aten.embedding", "aten.softmax", "attention_weights", "dropout", "getitem"}))


def find(name: str) -> Operator | None:
    """Return the JAX function of an operator (`aten.add`), or None."""
    return _OPS.get(name)


def bind(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call by the names of the ATen schema, its defaults included; `self` becomes `x`."""
    schema = getattr(target, "_schema", None)
    if schema is None and isinstance(target, types.FunctionType):
        call = inspect.signature(target).bind(*args, **kwargs)
        call.apply_defaults()
        renamed = {"scores": "x"}
        return {renamed.get(name, name): value for name, value in call.arguments.items()}
    if schema is None:
        return dict(zip(("x", "other"), args, strict=False))
    bound = {each.name: each.default_value for each in schema.arguments if each.has_default_value()}
    bound |= dict(zip((each.name for each in schema.arguments), args, strict=False)) | dict(kwargs)
    return {"x" if name == "self" else name: value for name, value in bound.items()}


def operator(*names: str) -> Callable[[Operator], Operator]:
    """Register a function under ATen names (without the prefix), other dotted names, or as ops that are not ATen's."""

    def register(function: Operator) -> Operator:
        for name in names:
            _OPS[name if "." in name or name in _NOT_ATEN else f"aten.{name}"] = function
        return function

    return register


def cut(x: Any, dim: int, start: int, end: int, step: int = 1) -> Any:
    """Return `x[start:end:step]` along `dim`."""
    index: list[Any] = [slice(None)] * x.ndim
    index[dim] = slice(start, end, step)
    return x[tuple(index)]
