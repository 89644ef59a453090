"""Features of queries and keys whose products linear attention has in the place of exponentials of scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from aero_compile.ir.rewriter import Rewriter

aten = torch.ops.aten

BY_ELEMENT = ("elu", "relu", "square", "exp")
"""Features that are a function of each element."""


def by_element(rewriter: Rewriter, features: str, x: fx.Node) -> fx.Node:
    """φ(x) of the shape of x: elu(x) + 1 = relu(x) + exp(min(x, 0)), relu(x), x² or exp(x)."""
    call = rewriter.call
    if features == "square":
        return call(aten.mul.Tensor, x, x)
    if features == "exp":
        return call(aten.exp.default, x)
    positive = call(aten.relu.default, x)
    if features == "relu":
        return positive
    negative = call(aten.sub.Tensor, x, positive)
    return call(aten.add.Tensor, positive, call(aten.exp.default, negative))


def random_features(rewriter: Rewriter, directions: fx.Node, count: int, x: fx.Node) -> fx.Node:
    """φ(x) = exp(W·x − |x|²/2)/√m, `[..., m]`, of x `[..., d]`, with W in the columns of `directions`, `[d, m]`.

    φ(x)·φ(y) is exp(x·y) on average over directions of normal numbers (Choromanski et al. 2021, lemma 1).
    """
    call = rewriter.call
    norm = call(aten.sum.dim_IntList, call(aten.mul.Tensor, x, x), [-1], True)
    less = call(aten.add.Tensor, call(aten.mul.Tensor, norm, 0.5), 0.5 * math.log(count))
    return call(aten.exp.default, call(aten.sub.Tensor, call(aten.matmul.default, x, directions), less))


def orthogonal_directions(width: int, count: int, seed: int) -> Tensor:
    """`[width, count]` in float64: columns that are orthogonal in blocks of `width`, each as long as a normal vector.

    They vary less than independent ones, with the same average (Choromanski et al. 2021, section 3).
    """
    draw = torch.Generator().manual_seed(seed)
    blocks = []
    for _ in range(-(-count // width)):
        turned, rest = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64, generator=draw))
        lengths = torch.randn(width, width, dtype=torch.float64, generator=draw).norm(dim=0)
        blocks.append(turned * rest.diagonal().sign() * lengths)  # without the signs not all turns are as likely
    return torch.cat(blocks, 1)[:, :count].contiguous()
