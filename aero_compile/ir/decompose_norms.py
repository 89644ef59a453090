"""Deviation norms written as arithmetic, for what knows ATen ops only."""

from __future__ import annotations

import torch
from torch import fx

from aero_compile.ir.deviation_norm import deviation_norm
from aero_compile.ir.rewriter import Rewriter

aten = torch.ops.aten


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
        y = y if weight is None else call(aten.mul.Tensor, y, weight)
        rewriter.replace(y if bias is None else call(aten.add.Tensor, y, bias))
    return bool(found)
