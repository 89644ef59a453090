"""Decoders as tutorials and well-known code write them: captured, counted, transformed, saved and loaded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aero_compile
from tests.capturing.test_capture import Small, same_function
from tests.tiny_models import randomize, tokens

WIDTH, HEADS, VOCAB = 24, 3, 30


class Tutorial(nn.Module):
    """nn.TransformerEncoder with a mask and no `is_causal`, batch first or sequence first."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 40, 0.1, batch_first=batch_first)
        self.embedding, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(32, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        length = src.shape[1]
        if src_mask is None:
            src_mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.embedding(src) * math.sqrt(WIDTH) + self.position(torch.arange(length))
        if self.batch_first:
            return self.head(self.encoder(x, mask=src_mask))  # type: ignore[no-any-return]
        return self.head(self.encoder(x.transpose(0, 1), src_mask).transpose(0, 1))  # type: ignore[no-any-return]


class BorrowedDtype(Small):
    """The mask takes its dtype from hidden states, and softmax is taken in another one."""

    def weigh(self, scores: Tensor, mask: Tensor) -> Tensor:
        length = scores.shape[-1]
        ahead = torch.full((length, length), float("-inf")).triu(1)
        ahead = torch.hstack([torch.zeros((length, 0)), ahead]).type_as(scores)
        return F.softmax((scores + ahead).double(), dim=-1).type_as(scores)


class WrittenMask(Small):
    def weigh(self, scores: Tensor, mask: Tensor) -> Tensor:
        scores[(mask == 0).expand_as(scores)] = float("-inf")
        return F.softmax(scores, -1)


class WrittenMaskInView(Small):
    def weigh(self, scores: Tensor, mask: Tensor) -> Tensor:
        scores[:, :, mask == 0] = -1e9
        return F.softmax(scores, -1)


def stacked() -> nn.Module:
    """A top-level nn.Sequential, whose parts have numbers for names."""

    class Start(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(32, WIDTH)

        def forward(self, ids: Tensor) -> Any:
            return self.embedding(ids) + self.position(torch.arange(ids.shape[1]))

    class Block(Small):
        def forward(self, x: Tensor) -> Any:
            return self.block(x, 0)

    return nn.Sequential(Start(), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))


PLAIN: dict[str, tuple[Any, str]] = {
    "tutorial": (lambda: Tutorial(batch_first=True), "SM:6×R^{8×8} LN:4×R^{8×24} R:2×R^{8×40}"),
    "tutorial, sequence first": (lambda: Tutorial(batch_first=False), "SM:6×R^{8×8} LN:4×R^{8×24} R:2×R^{8×40}"),
    "mask in the dtype of hidden states": (BorrowedDtype, "SM:3×R^{8×8} LN:2×R^{8×24} G:1×R^{8×40}"),
    "mask written": (WrittenMask, "SM:3×R^{8×8} LN:2×R^{8×24} G:1×R^{8×40}"),
    "mask written into a view": (WrittenMaskInView, "SM:3×R^{8×8} LN:2×R^{8×24} G:1×R^{8×40}"),
    "sequential": (stacked, "SM:6×R^{8×8} LN:4(+1 final)×R^{8×24} G:2×R^{8×40}"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_models(name: str, tmp_path: Path) -> None:
    make, expected = PLAIN[name]
    result = same_function(randomize(make()))
    assert str(aero_compile.census(result, 8)) == expected
    assert result.max_positions == 32
    model = aero_compile.transform(result, "softmax_only")
    assert aero_compile.census(model, 8).kinds == ("softmax",)
    ids = tokens(vocab=VOCAB)
    for each, folder in ((result, "plain"), (model, "norm-free")):
        loaded = aero_compile.load(aero_compile.save(each, tmp_path / folder))
        assert torch.equal(loaded(ids), each(ids))


def test_a_borrowed_dtype_follows_the_model() -> None:
    model = aero_compile.transform(randomize(BorrowedDtype()).eval(), "baseline")
    ids = tokens(vocab=VOCAB)
    expected = model(ids)
    half = model.to(torch.bfloat16)(ids)
    assert half.dtype == torch.bfloat16
    assert float((half - expected).detach().abs().max()) < 0.2 * float(expected.detach().abs().max())


class ShiftedWrittenMask(Small):
    """Each position sees the next one."""

    def weigh(self, scores: Tensor, mask: Tensor) -> Tensor:
        scores[:, :, torch.ones_like(mask).triu(2) == 1] = float("-inf")
        return F.softmax(scores, -1)


def test_a_written_mask_that_looks_ahead_is_refused() -> None:
    with pytest.raises(aero_compile.errors.UnsupportedModelError, match="not causal"):
        aero_compile.transform(ShiftedWrittenMask().eval(), "baseline")


class Distances(Small):
    """A learned bias for each distance: a table of positions only where the distance is not clamped."""

    def __init__(self, rows: int, clamped: bool) -> None:
        super().__init__()
        del self.tri
        self.register_buffer("tri", torch.ones(0, 0))
        self.bias, self.clamped, self.rows = nn.Embedding(rows, self.heads), clamped, rows

    def weigh(self, scores: Tensor, mask: Tensor) -> Tensor:
        place = torch.arange(scores.shape[-1])
        distance = place[:, None] - place[None] + self.rows // 2
        if self.clamped:
            distance = distance.clamp(0, self.rows - 1)
        scores = scores + self.bias(distance).permute(2, 0, 1)
        return F.softmax(scores.masked_fill(place[None] > place[:, None], float("-inf")), -1)

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.block(self.embed(ids), 0))


@pytest.mark.parametrize(("rows", "clamped", "limit"), [(9, True, None), (41, True, None), (41, False, 21)])
def test_clamped_distances_limit_nothing(rows: int, clamped: bool, limit: int | None) -> None:
    model = randomize(Distances(rows, clamped)).eval()
    result = aero_compile.transform(model, "baseline")
    assert result.max_positions == limit
    ids = tokens(2, limit or 60, vocab=VOCAB)
    assert torch.allclose(result(ids), model(ids), atol=1e-12)
