"""Options out of range, defaults, and the settings that decide what is learned."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from aero_compile.errors import InputError, OutputDirError
from aero_compile.retrain import RetrainOptions, retrain
from aero_compile.training.check_arguments import check_weights_type
from tests.support.tiny_runs import blocks, contents, evaluating, regularized, same_tensors, softmax_only, stopped


def test_default_weight_follows_the_recipe() -> None:
    assert RetrainOptions().weight == 0.05
    assert RetrainOptions(recipe="EReg(SM+R)", entropy_reduction="listing").weight == 1e-5
    assert RetrainOptions(recipe="SM+R").weight == 0.0
    assert RetrainOptions(recipe="SM+R", entropy_weight=0.3).weight == 0.3
    assert RetrainOptions(recipe="SM+R").weight == 0.0
    assert RetrainOptions(recipe="softmax_only").weight == 0.05
    assert RetrainOptions(recipe="SM(t)+ScFFN").weight == 0.0, "the paper's label of the model trained without"
    assert RetrainOptions(recipe="EReg(SM(t)+ScFFN)").weight == 0.05


@pytest.mark.parametrize(
    "changes",
    [
        {"entropy_weight": -1.0},
        {"gamma": math.nan},
        {"threshold_init": 2.0},
        {"entropy_reduction": "mean"},
        {"context": 1},
        {"validation_fraction": 0.0},
        {"entropy_blocks": 0},
        {"calibration_batches": 0},
    ],
)
def test_options_out_of_range(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        RetrainOptions(**changes)


@pytest.mark.parametrize(
    ("flags", "message"), [({"fp16": True}, "scales gradients"), ({"adam_epsilon": 1e-8}, "--adam-epsilon")]
)
def test_float16_weights_need_fitting_flags(flags: dict[str, Any], message: str, tmp_path: Path) -> None:
    args = evaluating(tmp_path)
    for name, value in flags.items():
        setattr(args, name, value)
    with pytest.raises(InputError, match=message):
        check_weights_type(regularized(dtype="float16"), args)
    args.fp16, args.adam_epsilon = False, 1e-4
    check_weights_type(regularized(dtype="float16"), args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 1e-4}, "learning_rate was 0.003, now 0.0001"),
        ({"per_device_train_batch_size": 2}, "per_device_train_batch_size was 4, now 2"),
        ({"weight_decay": 0.0}, "weight_decay was 0.1, now 0.0"),
        ({"optim": "sgd"}, "optim was 'adamw_torch.*', now 'sgd'"),
        ({"lr_scheduler_type": "constant"}, "lr_scheduler_type was 'cosine', now 'constant'"),
        ({"warmup_steps": 3}, "warmup_steps was"),
        ({"max_steps": 9}, "max_steps was 8, now 9"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"max_grad_norm": 0.5}, "max_grad_norm"),
        ({"bf16": True}, "bf16 was False, now True"),
    ],
)
def test_settings_that_matter_cannot_change_on_resume(change: dict[str, Any], message: str) -> None:
    before = contents(stopped())
    with pytest.raises(OutputDirError, match=message):
        retrain(regularized(resume="last"), evaluating(stopped(), **change), model=softmax_only(), datasets=blocks())
    assert contents(stopped()) == before


def test_a_run_of_constant_learning_rate_can_be_lengthened(tmp_path: Path) -> None:
    flat: dict[str, Any] = {"lr_scheduler_type": "constant", "eval_strategy": "no", "save_steps": 2}
    whole = retrain(
        regularized(), evaluating(tmp_path / "whole", max_steps=5, **flat), model=softmax_only(), datasets=blocks()
    )
    first = evaluating(tmp_path / "run", max_steps=3, **flat)
    retrain(regularized(), first, model=softmax_only(), datasets=blocks())
    longer = evaluating(tmp_path / "run", max_steps=5, **flat)
    result = retrain(regularized(resume="last"), longer, model=softmax_only(), datasets=blocks())
    assert same_tensors(result.model, whole.model)
    assert result.eval_loss == whole.eval_loss
