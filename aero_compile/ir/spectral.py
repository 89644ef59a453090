"""Spectral normalization of a weight matrix (Miyato et al. 2018, algorithm 1), as a module that a graph holds."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FIRST_ITERATIONS = 15
"""Power iterations on the first weight, as many as in `torch.nn.utils.parametrizations.spectral_norm`."""


class SpectralNorm(nn.Module):
    """W `[rows, columns]` → W / σ, where σ = uᵀ·W·v estimates the largest singular value.

    The unit vectors u `[rows]` and v `[columns]` are persistent buffers. In training mode every call first takes
    `n_power_iterations` steps v ← Wᵀu/‖Wᵀu‖, u ← Wv/‖Wv‖ (as torch orders them: u first); in evaluation mode they
    stay. The gradient goes through W in σ, and not through u and v.
    """

    u: Tensor
    v: Tensor

    def __init__(
        self,
        rows: int,
        columns: int,
        n_power_iterations: int = 1,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.rows, self.columns, self.n_power_iterations = rows, columns, n_power_iterations
        self.register_buffer("u", torch.zeros(rows, device=device, dtype=dtype))
        self.register_buffer("v", torch.zeros(columns, device=device, dtype=dtype))

    @classmethod
    def of(cls, weight: Tensor, n_power_iterations: int = 1) -> Self:
        """The module for `weight`, in its dtype and on its device; on the meta device nothing is computed."""
        rows, columns = weight.shape
        module = cls(rows, columns, n_power_iterations, device=weight.device, dtype=weight.dtype)
        if weight.device.type != "meta":
            generator = torch.Generator().manual_seed(0)  # the same start for every weight, run and device
            start = torch.randn(columns, generator=generator, dtype=torch.float64)
            module.v.copy_(F.normalize(start, dim=0))
            module.iterate(weight, FIRST_ITERATIONS)
        return module

    @torch.no_grad()
    def iterate(self, weight: Tensor, count: int) -> None:
        """Take `count` steps of the power iteration on `weight`."""
        v = self.v
        for _ in range(count):
            u = F.normalize(weight @ v, dim=0, eps=1e-12)
            v = F.normalize(weight.t() @ u, dim=0, eps=1e-12)
        self.u.copy_(u)
        self.v.copy_(v)

    def forward(self, weight: Tensor) -> Tensor:
        if self.training:
            self.iterate(weight, self.n_power_iterations)
        u, v = self.u.clone(), self.v.clone()  # a later step must not change what the backward pass needs
        sigma = torch.dot(u, weight @ v)
        return weight / sigma

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.columns}, n_power_iterations={self.n_power_iterations}"
