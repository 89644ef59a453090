"""The operators that only move values: views, copies, splits and joins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aero_compile.runtime.lazy_jax import jnp
from aero_compile.runtime.operators.declaration import cut, operator


@operator("reshape")
def _reshape(x: Any, shape: Sequence[int], **_: Any) -> Any:
    return x.reshape(tuple(shape))


@operator("flatten")
def _flatten(x: Any, start_dim: int = 0, end_dim: int = -1, **_: Any) -> Any:
    start, end = start_dim % x.ndim, end_dim % x.ndim
    return x.reshape((*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :]))


@operator("unflatten")
def _unflatten(x: Any, dim: int, sizes: Sequence[int], **_: Any) -> Any:
    at = dim % x.ndim
    return x.reshape((*x.shape[:at], *sizes, *x.shape[at + 1 :]))


@operator("transpose")
def _transpose(x: Any, dim0: int, dim1: int, **_: Any) -> Any:
    return jnp().swapaxes(x, dim0, dim1)


@operator("t")
def _t(x: Any, **_: Any) -> Any:
    return x.T


@operator("permute")
def _permute(x: Any, dims: Sequence[int], **_: Any) -> Any:
    return jnp().transpose(x, tuple(dims))


@operator("unsqueeze")
def _unsqueeze(x: Any, dim: int, **_: Any) -> Any:
    return jnp().expand_dims(x, dim)


@operator("squeeze")
def _squeeze(x: Any, dim: Any = None, **_: Any) -> Any:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return jnp().squeeze(x, tuple(d % x.ndim for d in dims if x.shape[d] == 1))


@operator("expand", "expand_as")
def _expand(x: Any, size: Sequence[int], **_: Any) -> Any:
    extra = len(size) - x.ndim
    shape = [x.shape[i - extra] if want == -1 else want for i, want in enumerate(size)]
    return jnp().broadcast_to(x, tuple(shape))


@operator("repeat")
def _repeat(x: Any, repeats: Sequence[int], **_: Any) -> Any:
    return jnp().tile(x, tuple(repeats))


@operator("repeat_interleave")
def _repeat_interleave(x: Any, repeats: Any, dim: int | None = None, **_: Any) -> Any:
    if not isinstance(repeats, int):
        raise NotImplementedError("a number of repeats for each entry")
    x, at = (x.reshape(-1), 0) if dim is None else (x, dim % x.ndim)
    copies = jnp().broadcast_to(jnp().expand_dims(x, at + 1), (*x.shape[: at + 1], repeats, *x.shape[at + 1 :]))
    return copies.reshape((*x.shape[:at], x.shape[at] * repeats, *x.shape[at + 1 :]))


@operator("slice")
def _slice(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1, **_: Any) -> Any:
    first, last, stride = slice(start, end, step).indices(x.shape[dim])
    return cut(x, dim, first, last, stride)


@operator("select")
def _select(x: Any, dim: int, index: int, **_: Any) -> Any:
    at = index % x.shape[dim]
    return jnp().squeeze(cut(x, dim, at, at + 1), dim)


@operator("index")
def _index(x: Any, indices: Sequence[Any], **_: Any) -> Any:
    return x[tuple(slice(None) if index is None else index for index in indices)]


@operator("cat")
def _cat(tensors: Sequence[Any], dim: int = 0, **_: Any) -> Any:
    filled = [each for each in tensors if each.shape[dim]] or tensors[:1]  # SPU knows no empty arrays
    return jnp().concatenate(filled, axis=dim)


@operator("constant_pad_nd")
def _pad(x: Any, pad: Sequence[int], value: float = 0.0, **_: Any) -> Any:
    """Pairs of widths, of the last dimension first; negative ones cut."""
    for at in range(len(pad) // 2):
        dim, (before, after) = x.ndim - 1 - at, pad[2 * at : 2 * at + 2]
        x = cut(x, dim, max(0, -before), x.shape[dim] - max(0, -after))
        edges = [(*x.shape[:dim], max(0, width), *x.shape[dim + 1 :]) for width in (before, after)]
        filled = [jnp().full(edge, value, x.dtype) for edge in edges]
        x = _cat([filled[0], x, filled[1]], dim)
    return x


@operator("flip")
def _flip(x: Any, dims: Sequence[int], **_: Any) -> Any:
    return jnp().flip(x, tuple(dims))


@operator("roll")
def _roll(x: Any, shifts: Sequence[int], dims: Sequence[int] = (), **_: Any) -> Any:
    return jnp().roll(x, tuple(shifts), tuple(dims)) if dims else jnp().roll(x, shifts[0])


@operator("index_select")
def _index_select(x: Any, dim: int, index: Any, **_: Any) -> Any:
    return x[(*[slice(None)] * (dim % x.ndim), index)]


@operator("stack")
def _stack(tensors: Sequence[Any], dim: int = 0, **_: Any) -> Any:
    return jnp().stack(tensors, axis=dim)


@operator("split", "split_with_sizes")
def _split(x: Any, split_size: Any = None, split_sizes: Any = None, dim: int = 0, **_: Any) -> Any:
    wanted = split_sizes if split_sizes is not None else split_size
    total = x.shape[dim]
    sizes = [min(wanted, total - at) for at in range(0, total, wanted)] if isinstance(wanted, int) else wanted
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(cut(x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True))


@operator("chunk")
def _chunk(x: Any, chunks: int, dim: int = 0, **_: Any) -> Any:
    return _split(x, split_size=-(-x.shape[dim] // chunks), dim=dim)


@operator("unbind")
def _unbind(x: Any, dim: int = 0, **_: Any) -> Any:
    return tuple(_select(x, dim, i) for i in range(x.shape[dim]))


@operator("alias", "detach", "to", "_to_copy", "type_as")
def _same(x: Any, **_: Any) -> Any:
    return x


def padded_tokens(x: Any, pad: Sequence[int], token: int) -> Any:
    """One-hot rows beside which those of a token that everybody knows are put, in the places that `pad` says."""
    widths = [(0, 0)] * (x.ndim - 1 - len(pad) // 2) + list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    cuts = tuple(
        slice(max(0, -before), size - max(0, -after)) for size, (before, after) in zip(x.shape, widths, strict=False)
    )
    inside = np.ones(x.shape[:-1], np.bool_)[cuts]
    places = ~np.pad(inside, [(max(0, before), max(0, after)) for before, after in widths])
    filled = places[..., None] & (np.arange(x.shape[-1]) == token)
    return _pad(x, [0, 0, *pad]) + filled.astype(np.int32)


def joined_tokens(tensors: Sequence[Any], dim: int) -> Any:
    """One-hot rows, and public token ids, joined along a dimension of the ids."""
    width = next(each.shape[-1] for each in tensors if not isinstance(each, np.ndarray))
    rows = [
        (each[..., None] == np.arange(width)).astype(np.int32) if isinstance(each, np.ndarray) else each
        for each in tensors
    ]
    return _cat(rows, dim)


def getitem(x: Any, other: Any) -> Any:
    """One part of a sequence of values."""
    return x[other]


def first(x: Any) -> Any:
    """The value itself."""
    return x


def reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    """The value in another shape."""
    return x.reshape(shape)
