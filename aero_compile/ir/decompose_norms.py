"""Deviation norms written as arithmetic, for what knows ATen ops only, and put together again."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from aero_compile.ir.deviation_norm import deviation_norm
from aero_compile.ir.rewriter import Rewriter

aten = torch.ops.aten

_SHAPE = "normalized_shape"
"""Where the quotient of a deviation norm notes the sizes of the dimensions that are normalized."""


def decompose_deviation_norms(graph: fx.Graph) -> bool:
    """Write every deviation norm of `graph` as arithmetic, in place; returns whether there was one."""
    found = [node for node in graph.nodes if node.target is deviation_norm]
    for node in found:
        x, shape, weight, bias, eps, centered, form = node.args
        dims = list(range(-len(shape), 0))
        rewriter = Rewriter(node)
        call = rewriter.call
        if centered:
            x = call(aten.sub.Tensor, x, call(aten.mean.dim, x, dims, True))
        deviation = call(aten.sqrt.default, call(aten.mean.dim, call(aten.mul.Tensor, x, x), dims, True))
        bound = aten.add.Tensor if form == "added" else aten.clamp_min.default
        y = call(aten.div.Tensor, x, call(bound, deviation, eps))
        y.meta[_SHAPE] = tuple(shape)
        y = y if weight is None else call(aten.mul.Tensor, y, weight)
        rewriter.replace(y if bias is None else call(aten.add.Tensor, y, bias))
    return bool(found)


def join_deviation_norms(graph: fx.Graph) -> None:
    """Make the op of what `decompose_deviation_norms` wrote, in place; mean, gain and bias stay beside it.

    x/(√mean(x·x) + ε), x/max(√mean(x·x), ε) → deviation_norm(x, …, ε, centered=False)
    """
    for node in graph.find_nodes(op="call_function", target=aten.div.Tensor):
        if _SHAPE not in node.meta or node.kwargs:
            continue
        x, bound = node.args
        deviation = _operand(bound, aten.add.Tensor) or _operand(bound, aten.clamp_min.default)
        squares = _operand(_operand(deviation, aten.sqrt.default), aten.mean.dim)
        if _operand(squares, aten.mul.Tensor) is not x or squares.args != (x, x):
            continue
        form = "added" if bound.target is aten.add.Tensor else "at_least"
        rewriter, shape = Rewriter(node), list(node.meta[_SHAPE])
        rewriter.replace(rewriter.call(deviation_norm, x, shape, None, None, bound.args[1], False, form))
    graph.eliminate_dead_code(is_impure_node=lambda each: each.op in ("placeholder", "output"))


def _operand(node: Any, op: Any) -> Any:
    """The first operand of a call of `op` with no keywords; None of anything else."""
    return node.args[0] if isinstance(node, fx.Node) and node.target is op and not node.kwargs else None
