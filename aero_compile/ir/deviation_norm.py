"""Norms whose ε stands outside the root: neither a LayerNorm nor an RMSNorm for any ε, but a norm like them.

σ is the deviation of x over its last dimensions (around the mean, or around 0), and

    added:     (x − mean)/(σ + ε)·γ + b       Annotated Transformer, Zhang & Sennrich's RMSNorm
    at_least:  x/max(σ, ε)·γ + b              ScaleNorm (Nguyen & Salazar 2019), torch's F.normalize

`deviation_norm` is an op of the canonical graph beside `layer_norm` and `rms_norm`; `ir/decompose_norms.py` writes it
as arithmetic, for what knows ATen ops only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten


def deviation_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    form: str,
) -> Tensor:
    """Normalize `input`, `[…, *normalized_shape]`, over its last `len(normalized_shape)` dimensions.

    Args:
        input: floating-point values.
        normalized_shape: sizes of the dimensions that are normalized.
        weight, bias: γ and b of that shape, or None.
        eps: ε ≥ 0.
        centered: whether the mean is taken off.
        form: "added" or "at_least".
    """
    dims = list(range(-len(normalized_shape), 0))
    x = input - input.mean(dims, keepdim=True) if centered else input
    y = x / bounded_deviation(x.square().mean(dims, keepdim=True), eps, form)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def bounded_deviation(square: Tensor, eps: float, form: str) -> Tensor:
    """σ + ε or max(σ, ε), from σ²."""
    return square.sqrt() + eps if form == "added" else square.sqrt().clamp(min=eps)
