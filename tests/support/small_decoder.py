"""A decoder of one or two blocks in which tests swap parts, and the comparison with its capture."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aero_compile
from tests.support.made_once import made_once
from tests.support.tiny_models import logits_of, randomize, tokens


class Small(nn.Module):
    """A decoder whose methods are the parts that a test may override."""

    tri: Tensor

    def __init__(self, layers: int = 1, width: int = 24, heads: int = 3, positions: int = 32) -> None:
        super().__init__()
        self.heads, self.layers = heads, layers
        self.embed, self.position = nn.Embedding(30, width), nn.Embedding(positions, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 40) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(40, width) for _ in range(layers))
        self.head = nn.Linear(width, 30)
        self.register_buffer("tri", torch.tril(torch.ones(positions, positions)))

    def attend(self, x: Tensor, layer: int) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv[layer](x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)
        mixed = self.weigh_in(layer, scores, self.tri[:length, :length]) @ v
        out: Tensor = self.out[layer](mixed.transpose(1, 2).reshape(batch, length, width))
        return out

    def weigh_in(self, layer: int, scores: Tensor, mask: Tensor) -> Tensor:
        return self.weigh(scores, mask)

    def weigh(self, scores: Tensor, mask: Tensor) -> Tensor:
        return F.softmax(scores.masked_fill(mask == 0, float("-inf")), -1)

    def activate(self, x: Tensor) -> Tensor:
        return F.gelu(x)

    def block(self, x: Tensor, layer: int) -> Tensor:
        x = x + self.attend(self.norms[2 * layer](x), layer)
        out: Tensor = x + self.down[layer](self.activate(self.up[layer](self.norms[2 * layer + 1](x))))
        return out

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in range(self.layers):
            x = self.block(x, layer)
        return self.head(x)


def same_function(model: nn.Module, *, tolerance: float = 1e-10, example: Any = None, vocab: int = 30) -> Any:
    """Transform by the baseline and compare in evaluation mode; returns the transformed model."""
    model.eval()
    result = aero_compile.transform(model, "baseline", example_inputs=example)
    for batch, length in ((2, 9), (1, 1)):
        ids = tokens(batch, length, vocab=vocab)
        expected, got = logits_of(model(ids)), logits_of(result(ids))
        assert got.shape == expected.shape
        assert float((got - expected).detach().abs().max() / expected.detach().abs().max()) < tolerance
    return result


class Laid(Small):
    """Heads folded into the batch, grouped over shared keys, or a single one without an axis of its own."""

    layout = "folded"

    def attend(self, x: Tensor, layer: int) -> Tensor:
        batch, length, width = x.shape
        mask = self.tri[:length, :length]
        if self.layout == "one":
            q, k, v = self.qkv[layer](x).chunk(3, -1)
            mixed = self.weigh(q @ k.transpose(1, 2) / math.sqrt(width), mask) @ v
            return self.out[layer](mixed)  # type: ignore[no-any-return]
        q, k, v = (p.view(batch, length, 4, 6).transpose(1, 2) for p in self.qkv[layer](x).chunk(3, -1))
        if self.layout == "folded":
            q, k, v = (p.reshape(batch * 4, length, 6) for p in (q, k, v))
            mixed = torch.bmm(self.weigh(torch.bmm(q, k.transpose(1, 2)) / math.sqrt(6), mask), v)
            mixed = mixed.view(batch, 4, length, 6)
        else:
            k, v = k[:, ::2].unsqueeze(2), v[:, ::2].unsqueeze(2)
            q = q.reshape(batch, 2, 2, length, 6)
            mixed = self.weigh(q @ k.transpose(-1, -2) / math.sqrt(6), mask) @ v
            mixed = mixed.reshape(batch, 4, length, 6)
        return self.out[layer](mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


LAYOUTS = ("folded", "grouped", "one")


@made_once
def laid(layout: str) -> aero_compile.TransformedModel:
    """The capture of one of LAYOUTS; shared, so it must not be changed (transform copies it)."""
    source = randomize(Laid()).eval()
    source.layout = layout
    return aero_compile.transform(source, "baseline")
