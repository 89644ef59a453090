"""Fused attention → its scores, mask, softmax, dropout and product.

Before → after:
    scaled_dot_product_attention(q, k, v, mask)  → matmul(dropout(softmax(mask(scale·matmul(q, kᵀ)))), v)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from aero_compile.frontend.dropouts import insert_dropout
from aero_compile.frontend.spellings import model_dtype
from aero_compile.ir.mask_values import masked
from aero_compile.ir.rewriter import Rewriter
from aero_compile.ir.shapes import node_values, sample_shape
from aero_compile.model import TransformedModel

aten = torch.ops.aten

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def decompose_attention(model: TransformedModel) -> None:
    """Decompose every fused attention of the graph, in place."""
    values = node_values(model, *sample_shape(model))
    for node in list(model.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)):
        _decompose(model, node, values)


def _decompose(model: TransformedModel, node: fx.Node, values: dict[fx.Node, Any]) -> None:
    given: dict[str, Any] = dict(zip(_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    query, key, value = given["query"], given["key"], given["value"]
    rewriter = Rewriter(node, values=values)
    call = rewriter.call
    if given.get("enable_gqa"):
        groups = values[query].shape[-3] // values[key].shape[-3]
        key, value = (call(aten.repeat_interleave.self_int, x, groups, -3) for x in (key, value))
    scale = given.get("scale")
    if scale is None:
        scale = 1.0 / math.sqrt(values[query].shape[-1])
    scores = call(aten.matmul.default, query, call(aten.transpose.int, key, -2, -1))
    scores = call(aten.mul.Tensor, scores, scale)
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        size = [call(aten.sym_size.int, x, values[query].dim() - 2) for x in (query, key)]
        mask = call(aten.tril.default, call(aten.ones.default, size, dtype=torch.bool, device=values[query].device))
    if mask is not None:
        if values[mask].dtype == torch.bool:
            scores = call(aten.where.ScalarOther, mask, scores, masked(model_dtype(model)))
        else:
            scores = call(aten.add.Tensor, scores, mask)
    probabilities = call(aten.softmax.int, scores, -1)
    dropout = float(given.get("dropout_p") or 0.0)
    dropped = call(aten.alias.default, probabilities) if dropout > 0.0 else probabilities
    rewriter.replace(call(aten.matmul.default, dropped, value))
    if dropout > 0.0:
        insert_dropout(model, dropped, probabilities, dropout)
