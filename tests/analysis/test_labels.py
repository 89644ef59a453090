"""Labels, return values and sources that are not what a call needs: errors of ours; named tuples stay what they are."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aero_compile
from aero_compile.errors import ArtifactError, InputError, UnsupportedModelError
from aero_compile.ir.call_convention import tuple_class
from tests.support.small_decoder import Small
from tests.support.tiny_models import randomize

IDS = torch.arange(14).reshape(2, 7)


class Result(NamedTuple):
    logits: Tensor
    loss: Tensor | None
    notes: tuple[Tensor, ...]


class WithLoss(Small):
    """Its own loss leaves out -1, and it returns a named tuple."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(ids)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
        return Result(logits, loss, (logits * 2,))


@functools.cache
def plain() -> Any:
    return aero_compile.transform(randomize(Small()), "baseline")


@functools.cache
def with_loss() -> Any:
    return aero_compile.transform(randomize(WithLoss()), "baseline")


@pytest.mark.parametrize("label", [30, 10_000, -1, -99])
def test_labels_out_of_range(label: int) -> None:
    labels = IDS.clone()
    labels[1, 3] = label
    with pytest.raises(InputError, match=rf"label {label} is outside the 30 classes .* 0 to 29, and -100"):
        plain()(IDS, labels=labels)


@pytest.mark.parametrize(("label", "refused"), [(30, True), (-100, True), (-1, False), (29, False)])
def test_labels_of_a_loss_of_its_own(label: int, refused: bool) -> None:
    labels = IDS.clone()
    labels[0, 0] = label
    if refused:
        with pytest.raises(InputError, match=rf"label {label} is outside .* and -1 for"):
            with_loss()(IDS, labels)
    else:
        assert torch.isfinite(with_loss()(IDS, labels).loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_labels_that_are_no_integers(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match="labels must be integers"):
        plain()(IDS, labels=IDS.to(dtype))


def test_labels_that_are_left_out_and_small_integers() -> None:
    labels = IDS.clone()
    labels[:, :3] = -100
    assert torch.isfinite(plain()(IDS, labels=labels).loss)
    assert torch.isfinite(plain()(IDS, labels=IDS.to(torch.int32)).loss)


def test_a_named_tuple_comes_back_as_one() -> None:
    source = randomize(WithLoss()).eval()
    model = aero_compile.transform(source, "baseline")
    for arguments in ((IDS,), (IDS, IDS)):
        found, expected = model(*arguments), source(*arguments)
        assert type(found) is Result
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.notes[0], expected.notes[0], atol=1e-4, rtol=1e-4)
        assert (found.loss is None) == (expected.loss is None)


def test_a_named_tuple_where_its_class_is_not_known(tmp_path: Path) -> None:
    aero_compile.save(with_loss(), tmp_path / "a")
    code = (
        "import torch, aero_compile, sys\n"
        f"r = aero_compile.load({str(tmp_path / 'a')!r})(torch.zeros(2, 5, dtype=torch.int64))\n"
        "print(type(r).__name__, r._fields, r.loss, tuple(r.logits.shape), type(r.notes))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert ended.stdout.strip() == "Result ('logits', 'loss', 'notes') None (2, 5, 30) <class 'tuple'>", ended.stderr


@pytest.mark.parametrize("fields", [["a", "a"], ["_a"], ["class"], ["a b"], [3], ["a=__import__('os')"]])
def test_names_of_tuples_are_names(fields: list[Any]) -> None:
    with pytest.raises(InputError, match="named tuple"):
        tuple_class("Output", fields)


def test_a_forged_named_tuple(tmp_path: Path) -> None:
    path = aero_compile.save(with_loss(), tmp_path / "a") / "aero_compile.json"
    path.write_text(path.read_text().replace('"class": "Result"', '"class": "a; import os"'))
    with pytest.raises(ArtifactError):
        aero_compile.load(tmp_path / "a")


def test_torchscript_is_refused_by_name() -> None:
    traced = torch.jit.trace(Small().eval(), IDS)  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedModelError, match=r"the model is TorchScript .* give the nn.Module"):
        aero_compile.transform(traced)
    holder = Small()
    holder.head = torch.jit.trace(nn.Linear(24, 30), torch.zeros(2, 24))  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedModelError, match="head of the model is TorchScript"):
        aero_compile.transform(holder)


def test_weights_of_several_dtypes() -> None:
    class Mixed(Small):
        def activate(self, x: Tensor) -> Tensor:
            return F.gelu(x).bfloat16()

        def block(self, x: Tensor, layer: int) -> Tensor:
            return super().block(x, layer).float()

    model = Mixed()
    model.down.bfloat16()
    with pytest.raises(UnsupportedModelError, match=r"several dtypes, float32 \(.*\), bfloat16 \(down.0.*model.float"):
        aero_compile.transform(model, "baseline")
