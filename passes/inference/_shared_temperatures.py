"""Temperatures that are the same at every position, `[H, T]`, become one number for each head, `[H, 1]`.

Before → after (s `[H, T_max]`, its rows constant):
    q·unsqueeze(s[:, :T], −1)  → q·unsqueeze(s[:, :1], −1)

Only then do they go into the rows of a weight.
"""

from __future__ import annotations

import torch
from torch import fx

from aero_compile.ir.dataflow import fixed_nodes, tainted_nodes
from aero_compile.ir.ops import SCALES, SHAPE_ONLY, of_form
from aero_compile.ir.weights import weight_value
from aero_compile.model import TransformedModel

aten = torch.ops.aten

_KEEPS = of_form("copy", "negation", "slice", "repeat")
_KEEPS |= {aten.exp.default, aten.reciprocal.default, aten.unsqueeze.default}


def share_temperatures(model: TransformedModel) -> int:
    """Cut such tables to one column, in place; returns how many were."""
    live = tainted_nodes(model.graph, model.convention.tokens)
    fixed = fixed_nodes(model.graph)
    count = 0
    for node in model.graph.nodes:
        if node in live or node.target is not aten.slice.Tensor or len(node.args) != 4:
            continue
        source, dim, start, end = node.args
        if start not in (0, None) or not isinstance(end, fx.Node) or source not in fixed:
            continue
        value = weight_value(model, source)
        if value.is_floating_point() and bool((value == value.narrow(dim, 0, 1)).all()) and _broadcasts(node, live):
            node.args = (source, dim, 0, 1)
            count += 1
    return count


def _broadcasts(node: fx.Node, live: set[fx.Node]) -> bool:
    """Whether products with hidden values are all that becomes of `node`, so that a dimension of 1 will do."""
    for user in node.users:
        if user.target in SCALES and user in live and user.args[0] in live:
            continue
        if user.target in SHAPE_ONLY:
            return False
        inferred = user.target is aten.reshape.default and -1 in user.args[1]  # type: ignore[operator]
        if not (inferred or user.target in _KEEPS) or not _broadcasts(user, live):
            return False
    return True
