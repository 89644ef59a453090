"""References for the passes that put something else in the place of the softmax, and what each of them must do."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

import aero_compile
from aero_compile.decoding.step import decode_step
from aero_compile.optimize import optimize_for_inference
from tests.support import tiny_models
from tests.support.tiny_models import HEADS, LAYERS, source, tokens, transformed

Row = Callable[[Tensor], Tensor]

EPS = 1 / 64


def _normalized(row: Tensor) -> Tensor:
    return row / (row.sum() + len(row) * EPS)


ROWS: dict[str, Row] = {
    "quad-softmax": lambda s: (s + 5) ** 2 / (((s + 5) ** 2).sum() + len(s) * EPS * 25),
    "quad-softmax{c=2.0,eps=0.0}": lambda s: (s + 2) ** 2 / ((s + 2) ** 2).sum(),
    "power-softmax{power=4,scale=2.0}": lambda s: _normalized((s / 2) ** 4),
    "relu-attention": lambda s: s.clamp(min=0) / len(s),
    "relu-attention{power=2}": lambda s: s.clamp(min=0) ** 2 / len(s),
    "sigmoid-attention": lambda s: 1 / (1 + torch.exp(math.log(len(s)) - s)),
}
"""Weights of the scores that a row sees."""

FEATURES: dict[str, Row] = {"elu": lambda x: F.elu(x) + 1, "relu": F.relu, "square": lambda x: x * x}


def weights_of(row: Row) -> Callable[..., Tensor]:
    """A softmax's stand-in that looks at positions and not at masks: row i sees the keys 0 … i."""

    def softmax(scores: Tensor, *_: Any, **__: Any) -> Tensor:
        found = torch.zeros_like(scores)
        for index in torch.cartesian_prod(*(torch.arange(n) for n in scores.shape[:-1])):
            at = tuple(index.tolist())
            found[at][: at[-1] + 1] = row(scores[at][: at[-1] + 1])
        return found

    return softmax


def linear(features: Row) -> Callable[..., Any]:
    """An attention of Hugging Face by the recurrence of Katharopoulos et al. 2020: a state that grows with each key."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        q, k = features(query) * query.shape[-1] ** -0.5, features(key.repeat_interleave(groups, 1))
        value = value.repeat_interleave(groups, 1)
        state, norm, found = torch.zeros_like(q[:, :, :1].mT @ value[:, :, :1]), torch.zeros_like(q[:, :, 0]), []
        for i in range(q.shape[2]):
            state = state + k[:, :, i, :, None] * value[:, :, i, None]
            norm = norm + k[:, :, i]
            divisor = (q[:, :, i] * norm).sum(-1, keepdim=True) + (i + 1) * EPS
            found.append((q[:, :, i, None] @ state)[:, :, 0] / divisor)
        return torch.stack(found, 1), None

    return attention


def agrees(name: str, recipe: str, batch: int = 2, length: int = 9) -> None:
    model, reference, ids = transformed(name, recipe).eval(), source(name), tokens(batch, length)
    if recipe in ROWS:
        patch = mock.patch.object(F, "softmax", weights_of(ROWS[recipe]))
    else:
        features = FEATURES[recipe.partition("=")[2].rstrip("}")]
        patch = mock.patch.object(sys.modules[type(reference).__module__], "eager_attention_forward", linear(features))
    with torch.no_grad():
        found = tiny_models.all_logits(model, ids)
        with patch:
            expected = tiny_models.all_logits(reference, ids)
    # families compute softmax and rotary positions in float32 inside
    assert float((found - expected).abs().max() / expected.abs().max()) < 5e-6


def goes_everywhere(recipe: str, folder: Path) -> None:
    """Census, entropies, gradients, artifact, idempotence, exact passes and decoding with a cache."""
    model = transformed("llama-sdpa", recipe).eval()
    ids = tokens()
    (kind,) = {op.kind for op in aero_compile.census(model, 9).ops} & {
        *("2quad", "power_softmax", "relu_attention", "squared_relu_attention", "sigmoid_attention", "linear_attention")
    }
    assert aero_compile.census(model, 9).total(kind) == LAYERS * HEADS
    assert aero_compile.census(model, 9).total("softmax") == 0

    out = model(ids, labels=ids, output_entropies=True)
    (out.loss + sum(each.sum() for each in out.entropies)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    for each in out.entropies:
        assert each.shape == (2, HEADS, ids.shape[1])
        assert bool(((each >= 0) & (each <= torch.arange(1, ids.shape[1] + 1).log() + 1e-9)).all())

    with torch.no_grad():
        expected = tiny_models.all_logits(model, ids)
        shorter = tiny_models.all_logits(model, ids[:1, :5])
        torch.testing.assert_close(expected[:1, :5], shorter, rtol=0, atol=1e-10)
        aero_compile.save(model, folder / "artifact")
        loaded = aero_compile.load(folder / "artifact")
        assert torch.equal(tiny_models.all_logits(loaded, ids), expected)
        again = aero_compile.transform(model, recipe)
        assert not again.reports[-1].modified
        last = optimize_for_inference(model, logits="last")
        torch.testing.assert_close(tiny_models.logits_of(last(ids))[:, -1], expected[:, -1], rtol=0, atol=1e-6)
        step = decode_step(optimize_for_inference(model), 2, 6, 1)
        cached = step.empty()
        for at in range(5):
            logits, cached = step.run(ids[:, at : at + 1], at, cached)
            torch.testing.assert_close(logits[:, 0], expected[:, at], rtol=0, atol=1e-6)
