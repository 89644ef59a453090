"""Spread of norms' deviations: its value, what it leaves out, gradients, and its part in training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import aero_compile
from aero_compile.deviation_spread import deviation, deviation_spread, deviation_taps
from aero_compile.errors import InputError
from aero_compile.retrain import retrain
from aero_compile.tapped import run_tapped
from aero_compile.training.regularized_model import EntropyRegularizedModel
from tests.support import tiny_models
from tests.support.budgets import by_default, few
from tests.support.tiny_runs import arguments, blocks, captured, options

NAMES = by_default(tiny_models.EVERY, "gpt2-eager", "llama-sdpa")


def spreads(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return run_tapped(model, {"deviations": deviation_taps}, ids)["inside"]["deviations"]  # type: ignore[no-any-return]


@few(max_examples=25)
@given(st.integers(1, 3), st.integers(2, 6), st.integers(2, 9), st.floats(0.1, 100), st.integers(0, 999))
def test_the_value_is_that_of_the_definition(batch: int, length: int, width: int, scale: float, seed: int) -> None:
    x = scale * torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sigma = torch.sqrt(x.var(-1, correction=0) + 1e-5)
    for position, rows in ((None, sigma), (-2, sigma[:, 1:])):
        expected = ((rows / rows.mean() - 1) ** 2).mean()
        torch.testing.assert_close(deviation_spread(x, 1, 1e-5, True, "root", position), expected)
    norm = F.layer_norm(x, (width,), eps=1e-5)
    torch.testing.assert_close((x - x.mean(-1, keepdim=True)) / deviation(x, 1, 1e-5, True, "root"), norm)


def test_equal_deviations_have_no_spread_and_outliers_at_position_0_do_not_count() -> None:
    x = torch.randn(2, 5, 8)
    x = F.layer_norm(x, (8,))
    x[:, 0] *= 1000
    assert float(deviation_spread(x, 1, 1e-5, True, "root", -2)) < 1e-9
    assert float(deviation_spread(x, 1, 1e-5, True, "root", None)) > 1


@pytest.mark.parametrize("name", NAMES)
def test_all_norms_of_a_model_are_measured(name: str) -> None:
    model, ids = copy.deepcopy(tiny_models.captured(name)).eval(), tiny_models.tokens(2, 7)
    norms = model.structure.norms
    values = spreads(model, ids)
    assert len(values) == len(norms)
    assert all(value.dim() == 0 and bool(torch.isfinite(value)) for value in values)


def test_frozen_norms_no_longer_count() -> None:
    model, ids = copy.deepcopy(tiny_models.captured("gpt2-eager")), tiny_models.tokens(2, 7)
    before = len(spreads(model, ids))
    half = aero_compile.transform(model, "freeze-layer-norm{norms=ffn}", calibration=ids)
    assert len(spreads(half, ids)) == before - model.num_layers
    whole = aero_compile.transform(model, "freeze-layer-norm", calibration=ids)
    assert spreads(whole, ids) == ()
    out = EntropyRegularizedModel(whole.train(), deviation_weight=1.0)(ids, labels=ids)
    torch.testing.assert_close(out.loss, out.ce_loss)


def trained(weight: float, ids: torch.Tensor) -> float:
    """Mean spread of the norms' deviations after some steps with a weight."""
    wrapper = EntropyRegularizedModel(
        copy.deepcopy(tiny_models.captured("gpt2-eager")).train(), deviation_weight=weight
    )
    optimizer = torch.optim.Adam(wrapper.parameters(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        wrapper(ids, labels=ids).loss.backward()
        optimizer.step()
    return float(torch.stack(spreads(wrapper.eval().model, ids)).mean().detach())


def test_the_loss_has_the_term_and_training_draws_deviations_together() -> None:
    model, ids = copy.deepcopy(tiny_models.captured("gpt2-eager")), tiny_models.tokens(4, 12)
    wrapper = EntropyRegularizedModel(model.train(), deviation_weight=2.0, weight=0.5)
    out = wrapper(ids, labels=ids)
    torch.testing.assert_close(out.loss, out.ce_loss + 2.0 * out.deviation_penalty + 0.5 * out.penalty)
    assert wrapper.eval()(ids, labels=ids).deviation_penalty is None
    assert trained(50.0, ids) < 0.5 * trained(0.0, ids)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_are_none_are_refused(weight: float) -> None:
    with pytest.raises(InputError, match="the weight of deviations"):
        EntropyRegularizedModel(tiny_models.captured("gpt2-eager"), deviation_weight=weight)


def test_checkpointing_is_refused() -> None:
    model = copy.deepcopy(tiny_models.captured("gpt2-eager")).train()
    wrapper = EntropyRegularizedModel(model, deviation_weight=1.0)
    wrapper.gradient_checkpointing_enable()
    ids = tiny_models.tokens(2, 6)
    with pytest.raises(InputError, match=r"--deviation-weight.*gradient checkpointing"):
        wrapper(ids, labels=ids)


def test_runs_record_it_and_models_without_norms_are_refused(tmp_path: Path) -> None:
    chosen = options(recipe="baseline", deviation_weight=0.5)
    result = retrain(chosen, arguments(tmp_path / "run"), model=captured(), datasets=blocks())
    steps = [line for line in result.history if "deviation_penalty" in line]
    assert steps
    for line in steps:
        assert line["loss"] == pytest.approx(line["ce_loss"] + 0.5 * line["deviation_penalty"], rel=1e-3)
    bare = options(recipe="SM+R", deviation_weight=0.5)
    with pytest.raises(InputError, match="--deviation-weight is for the deviations of norms"):
        retrain(bare, arguments(tmp_path / "none"), model=captured(), datasets=blocks())
