"""The table of live operators that the runtime can execute (ATen name → JAX function), and watched values inside them.

A function takes the arguments of the ATen schema by name (`self` is called `x`), with live tensors as
JAX arrays, server tensors as JAX arrays (inputs of the program) and public tensors as NumPy arrays.
`exact=True` selects the textbook function instead of the fixed-point form where the two differ; the
structure of the computation is the same. The functions are in `products`, `pointwise` and `views`.

Values inside an operator that a private check must look at are reported where they arise and compared with their
limits. An operator reports by `watch`; only within `watching`, and only what is asked for, anything is computed.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from aero_compile.runtime.lazy_jax import jnp

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


@dataclass
class Watch:
    """What to look at, by name: (low, high), None for an end that needs no look; and what was found.

    `outside`: for each value that was looked at, how many of its entries lie outside, an array of no dimension.
    """

    wanted: Mapping[str, tuple[float | None, float | None]]
    outside: list[Any] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)


_CURRENT: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watching(wanted: Mapping[str, tuple[float | None, float | None]]) -> Iterator[Watch]:
    """Within this context operators look at `wanted`.

    Raises:
        AssertionError: an operator did not report something that was wanted.
    """
    watch = Watch(wanted)
    token = _CURRENT.set(watch)
    try:
        yield watch
    finally:
        _CURRENT.reset(token)
    assert watch.seen == set(wanted), f"an operator did not report {sorted(set(wanted) - watch.seen)}"


def watch(what: str, value: Any) -> None:
    """Report a value under the name that it has in the table of limits."""
    current = _CURRENT.get()
    if current is None or what not in current.wanted:
        return
    current.seen.add(what)
    current.outside.append(count_outside(value, *current.wanted[what]))


def count_outside(value: Any, low: Any | None, high: Any | None) -> Any:
    """How many entries lie below `low` or above `high`: numbers, or arrays of the shape of `value`.

    Both ends are compared at once.
    """
    ends = [low - value] if low is not None else []
    ends += [value - high] if high is not None else []
    if len(ends) == 1:
        return jnp().where(ends[0] > 0.0, 1.0, 0.0).sum()
    below, above = jnp().stack(ends) > 0.0
    return jnp().where(below | above, 1.0, 0.0).sum()
