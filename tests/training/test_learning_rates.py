"""Learning rates by role, and lambda's warm-up: what each step takes, and the same after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import aero_compile
from aero_compile.errors import InputError, OutputDirError
from aero_compile.retrain import retrain
from aero_compile.training.learning_rates import choose_roles, fill_groups, parse_lr_scale, role_of, split_groups
from tests.support.budgets import by_default
from tests.support.tiny_runs import arguments, blocks, captured, killed_at, options, same_tensors

ROLES: dict[str, set[str]] = {
    "softmax_only": {"scaled_ffn.alpha", "scaled_ffn.beta", "softmax_temperature.t"},
    "SM(t/layer)": {"softmax_temperature.t"},
    "SM+WNorm(QK+FFN)": {"weight_norm.g"},
    "leaky-relu{learn=global}": {"leaky_relu.slope"},
    "leaky-relu{learn=layer},layer-norm-to-dyt": {"leaky_relu.slope", "layer_norm_to_dyt.alpha"},
    "ffn-gains": {"ffn_gains.branch", "ffn_gains.skip"},
    "shaped-attention": {f"shaped_attention.{part}" for part in ("identity", "attention", "centre")},
    "gelu-to-relu": set(),
}


@pytest.mark.parametrize("recipe", by_default(ROLES, "leaky-relu{learn=layer},layer-norm-to-dyt"))
def test_roles_follow_the_names_that_passes_give(recipe: str) -> None:
    model = aero_compile.transform(captured(), recipe)
    assert {role_of(f"model.{name}") for name, _ in model.named_parameters()} - {None} == ROLES[recipe]
    assert {role_of(name) for name, _ in captured().named_parameters()} == {None}


def test_roles_that_a_model_does_not_have_are_refused() -> None:
    names = ["scaled_ffn.0.alpha", "scaled_ffn.1.beta", "thresholds", "layer_norm_to_dyt.0.ffn.alpha", "h.0.weight"]
    assert choose_roles({"beta": 2.0, "layer_norm_to_dyt.alpha": 0.5}, names) == {
        "scaled_ffn.beta": 2.0,
        "layer_norm_to_dyt.alpha": 0.5,
    }
    with pytest.raises(InputError, match="no parameter is a t; this model has alpha, alpha, beta, theta"):
        choose_roles({"t": 1.0}, names)
    with pytest.raises(InputError, match=r"two passes: write one of layer_norm_to_dyt.alpha, scaled_ffn.alpha"):
        choose_roles({"alpha": 1.0}, names)
    with pytest.raises(InputError, match="none, since no pass added parameters"):
        choose_roles({"t": 1.0}, ["h.0.weight"])
    for text in ("t", "t=", "t=-1", "t=nan", "=1", "t=1,t=2"):
        with pytest.raises(InputError, match="--lr-scale"):
            parse_lr_scale(text)
    assert parse_lr_scale(" t = 0.1, alpha=1 ,") == {"t": 0.1, "alpha": 1.0}


def test_a_role_moves_as_if_trained_alone_at_its_rate() -> None:
    """SGD: a step is the rate times the gradient, so the factor can be read off; the decay is what it was."""
    model = aero_compile.transform(captured(), "SM(t)+ScFFN")
    named = list(model.named_parameters())
    matrices = [p for _, p in named if p.dim() > 1]
    others = [p for _, p in named if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    scales = {"softmax_temperature.t": 0.1, "scaled_ffn.alpha": 3.0, "scaled_ffn.beta": 0.0}
    split_groups(optimizer, scales)
    fill_groups(optimizer, named, {name for name, p in named if p.dim() > 1}, scales, 0.1)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(named)
    before = {name: p.detach().clone() for name, p in named}
    for _, p in named:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for name, p in named:
        rate = 0.5 * scales.get(role_of(name) or "", 1.0)
        decay = 0.1 * before[name] if p.dim() > 1 else 0.0
        assert torch.allclose(p, before[name] - rate * (1 + decay), atol=1e-6), name


@pytest.fixture(scope="module")
def regularized() -> Any:
    return aero_compile.transform(captured(), "SM(t)+ScFFN")


def test_scales_and_warm_up_are_the_same_after_a_resume(regularized: Any, tmp_path: Path) -> None:
    chosen = {"entropy_weight": 0.2, "lr_scale": "t=5,alpha=0,theta=0.5", "lambda_warmup": 0.5}
    whole = retrain(options(**chosen), arguments(tmp_path / "whole"), model=regularized, datasets=blocks())
    with killed_at(4):
        retrain(options(**chosen), arguments(tmp_path / "run"), model=regularized, datasets=blocks())
    resumed = options(**chosen, resume="last")
    again = retrain(resumed, arguments(tmp_path / "run"), model=regularized, datasets=blocks())
    assert same_tensors(again.model, whole.model)
    for layer in (0, 1):
        assert float(whole.model.get_parameter(f"scaled_ffn.{layer}.alpha").detach()) == 1.0
        assert float(whole.model.get_parameter(f"scaled_ffn.{layer}.beta").detach()) != 1.0

    weights = [m["lambda"] for m in whole.history if "loss" in m]
    assert weights == pytest.approx([0.2 / 3, 0.4 / 3, 0.2, 0.2, 0.2, 0.2])
    for m in whole.history:
        if "loss" in m:
            assert m["loss"] == pytest.approx(m["ce_loss"] + m["lambda"] * m["penalty"], rel=1e-4)
    plain = options(**(chosen | {"lr_scale": None}), resume="last")
    with pytest.raises(OutputDirError, match=r"lr_scale was .*, now None"):
        retrain(plain, arguments(tmp_path / "run"), model=regularized, datasets=blocks())


def test_a_share_of_the_steps_fixes_their_number(regularized: Any, tmp_path: Path) -> None:
    constant = {"lr_scheduler_type": "constant", "save_steps": 2}
    args = arguments(tmp_path / "run", max_steps=2, **constant)
    chosen = {"entropy_weight": 0.2, "lambda_warmup": 0.9}
    retrain(options(**chosen), args, model=regularized, datasets=blocks())
    longer = arguments(tmp_path / "run", max_steps=4, **constant)
    with pytest.raises(OutputDirError, match="max_steps was 2, now 4"):
        retrain(options(**chosen, resume="last"), longer, model=regularized, datasets=blocks())


def test_warm_up_options_that_make_no_sense() -> None:
    for wrong in (-1.0, 1.5, float("nan")):
        with pytest.raises(InputError, match="--lambda-warmup"):
            options(entropy_weight=0.1, lambda_warmup=wrong)
    with pytest.raises(InputError, match="left out where lambda is 0"):
        options(lambda_warmup=10)
