"""Steps of models whose softmaxes have sinks, whose norms divide by a deviation plus ε, whose rotary is complex."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aero_compile
from aero_compile.decoding.step import decode_step
from tests.support.budgets import by_default
from tests.support.small_decoder import Small
from tests.support.tiny_models import logits_of, randomize, tokens


class _Sinks(Small):
    """Learned ones, as gpt-oss has them."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(self.heads))

    def weigh(self, scores: Tensor, mask: Tensor) -> Tensor:
        column = self.sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[-2], 1)
        hidden = scores.masked_fill(mask == 0, -math.inf)
        return F.softmax(torch.cat([hidden, column], -1), -1)[..., :-1]


class _OffByOne(Small):
    def weigh(self, scores: Tensor, mask: Tensor) -> Tensor:
        powers = scores.masked_fill(mask == 0, -math.inf).exp()
        return powers / (1 + powers.sum(-1, keepdim=True))


class _Deviation(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.shift


class _Deviations(Small):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(_Deviation(24) for _ in range(2))


class _Complex(Small):
    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        table = torch.outer(torch.arange(32.0), 100 ** (-torch.arange(0, 8, 2) / 8))
        self.register_buffer("angles", torch.polar(torch.ones_like(table), table))

    def attend(self, x: Tensor, layer: int) -> Tensor:
        length = x.shape[1]
        q, k, v = (p.unflatten(-1, (self.heads, -1)) for p in self.qkv[layer](x).chunk(3, -1))
        q, k = (
            torch.view_as_real(torch.view_as_complex(z.unflatten(-1, (-1, 2))) * self.angles[:length, None]).flatten(3)
            for z in (q, k)
        )
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        weights = self.weigh(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), self.tri[:length, :length])
        return self.out[layer]((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], Small]] = {
    "sinks": _Sinks,
    "off by one": _OffByOne,
    "deviations": _Deviations,
    "complex": _Complex,
}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_the_whole_forward(name: str) -> None:
    source = randomize(MODELS[name]()).eval()
    model = aero_compile.optimize_for_inference(aero_compile.transform(source, "baseline"), steps=True)
    counts, ids = (3, 1, 2, 1), tokens(2, 7, vocab=30)
    steps = {count: decode_step(model, 2, 9, count) for count in counts}
    cached: Sequence[Tensor] = [1e4 * torch.randn_like(each) for each in steps[1].empty()]
    found, begin = [], 0
    for count in counts:
        logits, cached = steps[count].run(ids[:, begin : begin + count], begin, cached)
        found.append(logits)
        begin += count
    torch.testing.assert_close(torch.cat(found, 1), logits_of(source(ids)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", by_default(MODELS, "sinks"))
def test_private_texts_are_those_of_the_clear(name: str) -> None:
    """Programs of all positions are rehearsed as they are made; the parties then choose the likeliest tokens."""
    pytest.importorskip("spu")
    source = randomize(MODELS[name]()).float().eval()
    seen: list[Any] = []

    def likeliest(logits: Any) -> int:
        seen.append(logits)
        return int(np.argmax(logits))

    made = aero_compile.private_generate(
        aero_compile.transform(source, "baseline"),
        [3, 1, 4],
        2,
        protocol="semi2k",
        choose=likeliest,
    )
    text = [3, 1, 4, *made.ids]
    with torch.no_grad():
        wanted = logits_of(source(torch.tensor([text])))[0, 2:4].numpy()
    assert np.abs(np.stack(seen) - wanted).max() < 0.02 + 0.05 * wanted.std()
