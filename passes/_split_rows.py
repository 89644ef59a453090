"""Split a linear layer by rows of its weight, so that some rows read another input.

Before → after (rows R of W, the others S):
    linear(x, W, b)  → put together in W's order: linear(x_R, W[R], b[R]) and linear(x_S, W[S], b[S])

Parameters stay whole: slices of them are taken in the graph. Layouts that repeat (queries, keys and values interleaved
by head) are cut once for all repetitions, so the graph does not grow with the number of heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection

import torch
from torch import fx

from aero_compile.ir.rewriter import Rewriter

aten = torch.ops.aten


def split_rows(linear: fx.Node, size: int, rows: Collection[int], chosen: fx.Node, rest: fx.Node) -> fx.Node:
    """Insert the split form of `linear`, whose weight has `size` rows: `rows` read `chosen`, the others `rest`.

    Returns the node of the result, of the same shape and order of channels as `linear`, which stays.
    """
    taken = [row in rows for row in range(size)]
    period = next(p for p in range(1, size + 1) if size % p == 0 and taken == taken[:p] * (size // p))
    repeats = size // period
    runs = [(flag, len(list(run))) for flag, run in itertools.groupby(taken[:period])]
    call = Rewriter(linear).call

    def pick(tensor: fx.Node, wanted: bool) -> fx.Node:
        """The rows of a weight or bias that are wanted."""
        dim = 1 if repeats > 1 else 0
        table = call(aten.unflatten.int, tensor, 0, [repeats, period]) if repeats > 1 else tensor
        pieces, start = [], 0
        for flag, length in runs:
            if flag == wanted:
                pieces.append(call(aten.slice.Tensor, table, dim, start, start + length))
            start += length
        whole = pieces[0] if len(pieces) == 1 else call(aten.cat.default, pieces, dim)
        return call(aten.flatten.using_ints, whole, 0, 1) if repeats > 1 else whole

    results: dict[bool, fx.Node] = {}
    for wanted, value in ((True, chosen), (False, rest)):
        result = call(aten.linear.default, value, *(pick(t, wanted) for t in linear.args[1:] if isinstance(t, fx.Node)))
        width = sum(length for flag, length in runs if flag == wanted)
        results[wanted] = call(aten.unflatten.int, result, -1, [repeats, width]) if repeats > 1 else result
    pieces, start = [], {True: 0, False: 0}
    for flag, length in runs:
        pieces.append(call(aten.slice.Tensor, results[flag], -1, start[flag], start[flag] + length))
        start[flag] += length
    joined = call(aten.cat.default, pieces, -1)
    return call(aten.flatten.using_ints, joined, -2, -1) if repeats > 1 else joined
