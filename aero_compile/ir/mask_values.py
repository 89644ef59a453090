"""What a score is set to where a position is hidden: lower than any score, and finite in the model's dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

MASKED_BELOW = -9e3
"""A score of at most this value is masked: -1e4 is the mildest mask in use, and a score is added to it."""

HIDDEN_BELOW = -1e3
"""What this adds to a score hides it from a softmax in float32, whether or not its author calls it a mask."""

MASKED = -1e30
"""Score of a hidden position: below every score, finite in float32 and bfloat16, and exactly zero after softmax."""

MASKED_HALF = -65504.0
"""The same in float16, which holds nothing lower."""


def masked(dtype: torch.dtype) -> float:
    """The score of a hidden position in a model of this dtype."""
    return MASKED_HALF if dtype is torch.float16 else MASKED


def bound_fill_values(node: fx.Node, dtype: torch.dtype) -> bool:
    """Let what a node fills in be finite in `dtype`, so that a row that is hidden whole gives no NaN.

    Returns whether the node was changed.
    """
    if node.op != "call_function" or node.target in (aten.clamp.default, aten.clamp_min.default):
        return False
    lowest = masked(dtype)

    def bounded(value: Any) -> Any:
        return lowest if isinstance(value, float) and value <= MASKED else value

    args, kwargs = tuple(map(bounded, node.args)), {key: bounded(value) for key, value in node.kwargs.items()}
    changed = args != node.args or kwargs != node.kwargs
    node.args, node.kwargs = args, kwargs
    return changed
