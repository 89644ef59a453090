"""Tensors that a model takes beside its tokens, such as positions `[B, T]` or a mask `[T, T]`, described as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aero_compile.errors import InputError

BATCH, LENGTH = "batch", "length"

Extra = dict[str, Any]
"""JSON form: `shape`, each size a number, `batch` or `length`; `dtype`, by its name (`int64`)."""


def describe_extra(value: Tensor, sizes: Sequence[int | str]) -> Extra:
    """The description of an argument, from a value and its sizes."""
    return {"shape": list(sizes), "dtype": str(value.dtype).removeprefix("torch.")}


def check_extra(name: str, extra: Any) -> None:
    """Raise InputError for a description, which may come from a file, that is not what it must be."""
    shape = extra.get("shape") if isinstance(extra, dict) else None
    sizes = isinstance(shape, list) and all(s in (BATCH, LENGTH) or (type(s) is int and 0 < s < 2**31) for s in shape)
    kind = getattr(torch, str(extra.get("dtype")), None) if isinstance(extra, dict) else None
    if not sizes or not isinstance(kind, torch.dtype):
        raise InputError(f"the argument {name!r} is described as {extra!r}")


def dtype_of(extra: Extra) -> torch.dtype:
    """The dtype that the argument was captured with."""
    kind: torch.dtype = getattr(torch, extra["dtype"])
    return kind


def shape_of(extra: Extra, batch: int, length: int) -> list[int]:
    """The sizes of the argument for tokens `[batch, length]`."""
    return [{BATCH: batch, LENGTH: length}.get(size, size) for size in extra["shape"]]


def require_extra(name: str, extra: Extra, value: Any, tokens: Tensor, family: str) -> Tensor:
    """The value given for an argument, checked.

    Raises:
        InputError: it is missing, no tensor, or of another shape or kind of number than the model was captured with.
    """
    batch, length = (int(n) for n in tokens.shape)
    wanted, described = shape_of(extra, batch, length), f"{extra['dtype']} [{', '.join(map(str, extra['shape']))}]"
    if value is None:
        raise InputError(f"argument {name!r} ({described}) is missing: {family} takes it beside the tokens")
    if not isinstance(value, Tensor):
        raise InputError(f"{name} must be a tensor ({described}), got {type(value).__name__}")
    if list(value.shape) != wanted:
        raise InputError(f"{name} has shape {list(value.shape)}, for these tokens it must be {wanted} ({described})")
    kinds = [(t.is_floating_point, t.is_complex, t == torch.bool) for t in (value.dtype, dtype_of(extra))]
    if kinds[0] != kinds[1]:
        raise InputError(f"{name} is {value.dtype}, but the model was captured with {extra['dtype']}")
    return value


def part_of_example(extra: Extra, example: Tensor | None, batch: int, length: int) -> Tensor:
    """The argument for tokens `[batch, length]`, cut from the value it was captured with.

    Raises:
        LookupError: there is no such value, or it is for fewer tokens.
    """
    shape = shape_of(extra, batch, length)
    if example is None or example.is_meta or any(n > size for n, size in zip(shape, example.shape, strict=True)):
        raise LookupError("no example of the argument")
    return example[tuple(slice(n) for n in shape)].cpu()


def check_extras(extras: Mapping[str, Any], names: Sequence[str]) -> None:
    """Check descriptions and names of arguments that may come from a file."""
    for name, extra in extras.items():
        if name not in names:
            raise InputError(f"the argument {name!r} is none of {', '.join(names)}")
        check_extra(name, extra)
