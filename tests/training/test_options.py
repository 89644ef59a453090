"""Options out of range, and defaults."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from aero_compile.errors import InputError
from aero_compile.retrain import RetrainOptions
from aero_compile.training.check_arguments import check_weights_type
from tests.support.tiny_runs import evaluating, regularized


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
