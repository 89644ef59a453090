"""Products with a weight → linear layers.

Before → after:
    addmm, matmul of a live x with a 2-D weight W  → linear(x, Wᵀ, bias)
    addmm, baddbmm of others                       → matmul + bias
    linear(x, W) + parameter of shape [out]        → linear(x, W, parameter)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from aero_compile.ir.dataflow import live_values
from aero_compile.ir.rewriter import Rewriter
from aero_compile.model import TransformedModel

aten = torch.ops.aten


def make_linears(model: TransformedModel) -> None:
    """Make linear layers of the products of a live value with a 2-D weight, in place."""
    live, values = live_values(model)
    for node in list(model.graph.nodes):
        if node.target not in (aten.addmm.default, aten.matmul.default):
            continue
        *bias, left, right = node.args
        rewriter = Rewriter(node, values=values, live=live)
        if _has_weight(left, right, live, values):
            if values[right].dim() > 2:  # einsum makes a batch of one
                right = rewriter.call(aten.reshape.default, right, list(values[right].shape[-2:]))
            rewriter.replace(rewriter.call(aten.linear.default, left, _transposed(rewriter, right), *bias))
        elif bias and node in live:
            rewriter.replace(open_sum(rewriter, node))


def open_sum(rewriter: Rewriter, node: fx.Node) -> fx.Node:
    """addmm(c, a, b, beta, alpha), or baddbmm → matmul(a, b)·alpha + c·beta; returns the sum, which is new."""
    call, (bias, left, right) = rewriter.call, node.args
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    result = call(aten.matmul.default, left, right)
    if alpha != 1:
        result = call(aten.mul.Tensor, result, alpha)
    if beta != 0:
        result = call(aten.add.Tensor, result, bias if beta == 1 else call(aten.mul.Tensor, bias, beta))
    return result


def _has_weight(left: Any, right: Any, live: set[fx.Node], values: Mapping[fx.Node, Any]) -> bool:
    """Whether a product's left factor is live, and its right one a matrix that is not."""
    if left not in live or right in live:
        return False
    shape = values[right].shape
    return 2 <= len(shape) <= max(2, values[left].dim()) and all(size == 1 for size in shape[:-2])


def _transposed(rewriter: Rewriter, weight: Any) -> fx.Node:
    plain = weight.target is aten.t.default or (
        weight.target in (aten.transpose.int, aten.permute.default)
        and tuple(weight.args[1:]) in ((0, 1), (1, 0), (-2, -1), (-1, -2), ([1, 0],))
    )
    if plain and isinstance(weight.args[0], fx.Node):
        return weight.args[0]
    return rewriter.call(aten.t.default, weight)


def take_up_biases(model: TransformedModel) -> None:
    """Let linear layers without a bias have the parameter that is added to them, in place."""
    live, values = live_values(model)
    for node in list(model.graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or node not in live:
            continue
        left, right = node.args
        for product, bias in ((left, right), (right, left)):
            if not isinstance(product, fx.Node) or not isinstance(bias, fx.Node) or bias in live:
                continue
            fits = product.target is aten.linear.default and len(product.args) == 2 and len(product.users) == 1
            if fits and bias.op == "get_attr" and values[bias].shape == values[product].shape[-1:]:
                rewriter = Rewriter(node, like=product)
                rewriter.replace(rewriter.call(aten.linear.default, *product.args, bias))
                Rewriter(product).erase()
                break
