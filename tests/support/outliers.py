"""A model with a norm, and a table in which one token's vector is much larger than the others."""

from __future__ import annotations

import torch

from tests.support.runtime_graphs import TokenRows, aten


def normed(values: torch.Tensor, rows: int = 4) -> TokenRows:
    """A norm and a projection of [1, rows, 32], from a table [64, 32]."""
    generator = torch.Generator().manual_seed(3)
    model = TokenRows(
        values,
        lambda x, m: aten.linear.default(aten.layer_norm.default(x, [32]), m.w),
        {"w": torch.randn(7, 32, generator=generator)},
    )
    model.shape = (1, rows, 32)
    return model


def table_with_outlier(largest: float = 1.0) -> torch.Tensor:
    """Vectors [64, 32] of 64 tokens, of which that of token 5 is `largest` times as large as the others."""
    table = torch.randn(64, 32, generator=torch.Generator().manual_seed(4))
    table[5] *= largest
    return table
