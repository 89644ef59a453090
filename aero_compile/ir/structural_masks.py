"""Masks that a few integers describe: bands of diagonals, blocks, prefixes, and their complements."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_PLANE = 4
"""Queries and keys of a stack of different masks; of smaller ones any bits could be the masks."""


def compact(table: Tensor) -> Tensor:
    """`table` without the dimensions along which it does not vary."""
    for dim in reversed(range(table.dim())):
        first = table.narrow(dim, 0, 1)
        if table.shape[dim] == 1 or bool((table == first).all()):
            table = first.squeeze(dim)
    return table


def is_pattern(mask: Tensor) -> bool:
    """Whether a boolean table that varies is a run `[K]`, a mask `[Q, K]`, or a stack of masks `[.., Q, K]`."""
    mask = compact(mask)
    if mask.dim() == 0:
        return True
    if mask.dim() == 1:
        return int((mask[1:] != mask[:-1]).sum()) <= 2
    planes = mask.reshape(-1, *mask.shape[-2:])
    if len(planes) > 1 and min(planes.shape[-2:]) < LEAST_PLANE:
        return False
    return all(_is_plane(plane) or _is_plane(~plane) for plane in planes)


def _is_plane(mask: Tensor) -> bool:
    """Whether each row of `[Q, K]` allows a run of keys whose ends follow the rows, and first keys (sinks) besides."""
    if _is_band(mask):
        return True
    rows, columns = mask.shape
    reached = mask | (torch.arange(columns) > torch.arange(rows)[:, None])
    sinks = int(reached.all(dim=0).long().cumprod(0).sum())
    return 0 < sinks < columns and _is_band(mask[:, :sinks]) and _is_band(mask[:, sinks:])


def _is_band(mask: Tensor) -> bool:
    rows, columns = mask.shape
    count = mask.sum(dim=1)
    used = torch.arange(rows)[count > 0]
    if not len(used) or bool((used[-1] - used[0] + 1) != len(used)):
        return not len(used)
    mask, count = mask[used], count[used]
    first = mask.long().argmax(dim=1)
    end = first + count
    keys = torch.arange(columns)
    if not torch.equal(mask, (keys >= first[:, None]) & (keys < end[:, None])):
        return False
    return _follows(first, columns) and _follows(end, columns)


def _follows(ends: Tensor, columns: int) -> bool:
    """Whether the ends of the runs are constant, one further each row, or in blocks, cut off at the edges."""
    steps = ends.diff()
    places = torch.arange(len(ends))
    if int((steps != 0).sum()) <= 1:  # constant, or from one edge to the other
        return True
    if bool((steps == 1).any()):
        at = int((steps == 1).long().argmax())
        ramp = (int(ends[at]) + places - at).clamp(int(ends.min()), int(ends.max()))
        if torch.equal(ends, ramp):
            return True
    jumps = (steps != 0).nonzero().flatten() + 1
    size = int(ends[int(jumps[0])] - ends[int(jumps[0]) - 1])
    if size < 2 or size > columns:
        return False
    offset = (size - int(jumps[0])) % size
    blocks = (places + offset) // size * size
    return torch.equal(ends, (blocks + int(ends[0])).clamp(0, columns))
