"""Split a linear layer by rows of its weight, so that some rows read another input.

Before → after (rows R of W, the others S):
    linear(x, W, b)  → put together in W's order: linear(x_R, W[R], b[R]) and linear(x_S, W[S], b[S])

Parameters stay whole: slices of them are taken in the graph (see `aero_compile.ir.weights`).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from aero_compile.ir.rewriter import Rewriter
from aero_compile.ir.weights import RowLayout

aten = torch.ops.aten


def split_rows(linear: fx.Node, size: int, rows: Collection[int], chosen: fx.Node, rest: fx.Node) -> fx.Node:
    """Insert the split form of `linear`, whose weight has `size` rows: `rows` read `chosen`, the others `rest`.

    Returns the node of the result, of the same shape and order of channels as `linear`, which stays.
    """
    layout, call = RowLayout.of([row in rows for row in range(size)]), Rewriter(linear).call
    results = {}
    for wanted, value in ((True, chosen), (False, rest)):
        tensors = [layout.take(call, each, wanted) for each in linear.args[1:] if isinstance(each, fx.Node)]
        results[wanted] = call(aten.linear.default, value, *tensors)
    return layout.put(call, results, -1)
