"""NaN and infinity are named with the place where they began."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aero_compile.errors import TrainingError
from aero_compile.retrain import retrain
from aero_compile.training.nonfinite import first_non_finite
from aero_compile.training.trainer import RegularizedTrainer
from tests.support.tiny_runs import CONTEXT, VOCABULARY, blocks, captured, evaluating, lines, regularized, softmax_only


def test_overflow_is_named_with_its_layer(tmp_path: Path) -> None:
    model = copy.deepcopy(captured())
    with torch.no_grad():
        model.get_parameter("transformer.h.1.mlp.c_fc.weight").fill_(3e38)
    with pytest.raises(TrainingError, match=r"(?s)at step 1\..*layer 1.*No checkpoint") as caught:
        retrain(regularized(recipe="relu"), evaluating(tmp_path / "run"), model=model, datasets=blocks())
    assert "transformer.h.1.mlp" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "artifact").exists()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "failed"
    assert "layer 1" in record["error"]
    failure = lines(tmp_path / "run" / "activations.jsonl")[-1]
    assert (failure["step"], failure["event"]) == (1, "failure")
    assert "transformer.h.1.mlp" in failure["where"]
    assert failure["ffn_output"]["non_finite"][0] == 0 < failure["ffn_output"]["non_finite"][1]


def test_nan_weight_and_bad_gradient_are_named(tmp_path: Path) -> None:
    broken = copy.deepcopy(softmax_only())
    with torch.no_grad():
        broken.get_parameter("scaled_ffn.1.alpha").fill_(torch.nan)
    with pytest.raises(TrainingError, match=r"the loss became NaN at step 1.*parameter scaled_ffn.1.alpha \(layer 1\)"):
        retrain(regularized(), evaluating(tmp_path / "a"), model=broken, datasets=blocks())

    def poison(self: Any, model: Any, *args: Any, **more: Any) -> torch.Tensor:
        loss: torch.Tensor = step(self, model, *args, **more)
        self.model.model.get_parameter("softmax_temperature.0.log_t").grad.fill_(torch.inf)
        return loss

    step = RegularizedTrainer.training_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RegularizedTrainer, "training_step", poison)
        with pytest.raises(TrainingError, match="the gradients became NaN or infinite at step 1"):
            retrain(regularized(), evaluating(tmp_path / "b"), model=softmax_only(), datasets=blocks())


def test_healthy_models_have_no_non_finite_place() -> None:
    ids = torch.randint(0, VOCABULARY, (2, CONTEXT))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    assert first_non_finite(softmax_only(), ids, mask) is None
    assert first_non_finite(captured(), ids) is None
