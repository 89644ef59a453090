"""Dropout of whole parts of a tensor: paths (stochastic depth), channels, positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class SharedDropout(nn.Dropout):
    """x → x·m/(1 − p), where one m ~ Bernoulli(1 − p) is drawn for all that differ in `axes` alone.

    With all axes but the first this is stochastic depth (Huang et al. 2016), with those from the second on dropout of
    channels. In evaluation it is the identity.
    """

    def __init__(self, p: float, axes: Sequence[int]) -> None:
        super().__init__(p)
        if not all(type(axis) is int for axis in axes):
            raise ValueError(f"axes {axes!r} are no numbers")
        self.axes = list(axes)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return input
        shape = [1 if axis in self.axes else size for axis, size in enumerate(input.shape)]
        mask = torch.empty(shape, dtype=input.dtype, device=input.device).bernoulli_(1.0 - self.p)
        return input * mask.div_(1.0 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}, axes={self.axes}"
