"""Weights that nothing can be computed with are named as the user's model names them, by whatever needs them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aero_compile
from aero_compile.errors import AeroError, InputError
from aero_compile.ir.usable_weights import check_weights
from aero_compile.runtime import compile_generation, compile_model
from tests.support.tiny_generation import small_captured, small_gpt2

IDS = torch.tensor([[1, 2, 3]])
USES: dict[str, Callable[[nn.Module, Path], Any]] = {
    "private_inference": lambda model, _: aero_compile.private_inference(model, IDS, "semi2k"),
    "private_generate": lambda model, _: aero_compile.private_generate(model, IDS, 2, "semi2k"),
    "compile_model": lambda model, _: compile_model(model, 1, 4, "semi2k"),
    "compile_generation": lambda model, _: compile_generation(model, 4, "semi2k"),
    "estimate": lambda model, _: aero_compile.estimate(model, 4),
    "optimize": lambda model, _: aero_compile.optimize_for_inference(model),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("transformed", [False, True])
def test_numbers_that_are_not_finite(use: str, value: float, transformed: bool, tmp_path: Path) -> None:
    pytest.importorskip("spu")
    model = copy.deepcopy(small_captured()) if transformed else small_gpt2()
    name, weight = [*model.named_parameters()][5]
    with torch.no_grad():
        weight.view(-1)[1:3] = value
    kind = "NaN" if math.isnan(value) else "infinity"
    with pytest.raises(InputError, match=rf"the weight {name} holds {kind} \(2 of {weight.numel():,} numbers"):
        USES[use](model, tmp_path)


def test_an_onnx_file_names_the_weight(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    model = copy.deepcopy(small_captured())
    with torch.no_grad():
        [*model.parameters()][5].view(-1)[0] = math.nan
    with pytest.raises(AeroError, match=r"the weight transformer\.h\.0\S+ holds NaN"):
        aero_compile.export_onnx(model, tmp_path / "x.onnx")


@pytest.mark.parametrize("use", set(USES) - {"estimate"})
@pytest.mark.parametrize("transformed", [False, True])
def test_weights_that_are_not_there(use: str, transformed: bool, tmp_path: Path) -> None:
    pytest.importorskip("spu")
    model = (copy.deepcopy(small_captured()) if transformed else small_gpt2()).to("meta")
    with pytest.raises(InputError, match=r"the weight transformer\.wte\.weight is on the meta device"):
        USES[use](model, tmp_path)


def test_whole_numbers_and_finite_ones_pass() -> None:
    model = nn.Linear(2, 2)
    model.register_parameter("counts", nn.Parameter(torch.arange(3), requires_grad=False))
    check_weights(model)
    model.register_buffer("mask", torch.tensor([-math.inf]))  # what masks is no weight
    check_weights(model)


def test_a_transformed_model_says_what_generates_text() -> None:
    for model in (small_captured(), aero_compile.optimize_for_inference(small_captured())):
        with pytest.raises(InputError, match=r"aero_compile\.private_generate\(model, ids, max_new_tokens\)"):
            model.generate(IDS, max_new_tokens=3)
