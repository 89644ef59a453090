"""Rows of a weight that belong to several parts: taken apart in the graph, and put together again.

Parameters stay whole. Layouts that repeat (queries, keys and values interleaved by head) are cut once for all
repetitions, so the graph does not grow with the number of heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

Call = Callable[..., fx.Node]
"""Adds a call to the graph, as `Rewriter.call` does."""


@dataclass(frozen=True)
class RowLayout:
    """Runs of rows, or channels, (part, length), one after the other, which occur `repeats` times."""

    runs: tuple[tuple[Hashable, int], ...]
    repeats: int

    @classmethod
    def of(cls, parts: Sequence[Hashable]) -> RowLayout:
        """The layout of rows of which each belongs to one of `parts`."""
        rows, size = list(parts), len(parts)
        period = next(p for p in range(1, size + 1) if size % p == 0 and rows == rows[:p] * (size // p))
        runs = tuple((part, len(list(run))) for part, run in itertools.groupby(rows[:period]))
        return cls(runs, size // period)

    def take(self, call: Call, tensor: fx.Node, part: Hashable) -> fx.Node:
        """The rows of one part of `tensor`, `[rows, …]`."""
        if len(self.runs) == 1:
            return tensor
        dim = int(self.repeats > 1)
        table = call(aten.unflatten.int, tensor, 0, [self.repeats, -1]) if dim else tensor
        pieces, start = [], 0
        for each, length in self.runs:
            if each == part:
                pieces.append(call(aten.slice.Tensor, table, dim, start, start + length))
            start += length
        whole = pieces[0] if len(pieces) == 1 else call(aten.cat.default, pieces, dim)
        return call(aten.flatten.using_ints, whole, 0, 1) if dim else whole

    def put(self, call: Call, parts: Mapping[Any, fx.Node], dim: int) -> fx.Node:
        """Put parts together along `dim`, 0 or −1; rows of parts that are not given are filled with any others."""
        if len(self.runs) == 1:
            return parts[self.runs[0][0]]
        inner, tables, starts = dim, dict(parts), dict.fromkeys(parts, 0)
        if self.repeats > 1:
            inner = 1 if dim == 0 else -1
            tables = {part: call(aten.unflatten.int, each, dim, [self.repeats, -1]) for part, each in parts.items()}
        pieces = []
        filler, width = next((part, self._width(part)) for part in parts)
        for part, length in self.runs:
            if part in parts:
                pieces.append(call(aten.slice.Tensor, tables[part], inner, starts[part], starts[part] + length))
                starts[part] += length
                continue
            gaps = [min(width, length - start) for start in range(0, length, width)]
            pieces += [call(aten.slice.Tensor, tables[filler], inner, 0, gap) for gap in gaps]
        joined = call(aten.cat.default, pieces, inner)
        return call(aten.flatten.using_ints, joined, inner - 1, inner) if self.repeats > 1 else joined

    def _width(self, part: Hashable) -> int:
        return sum(length for each, length in self.runs if each == part)
