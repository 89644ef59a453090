"""Values that do not fit the fixed-point format are found before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aero_compile.errors import LoweringError
from aero_compile.runtime.partition import partition
from aero_compile.runtime.ranges import RangeCheck
from aero_compile.runtime.to_jax import lower
from tests.runtime.graphs import TokenRows, aten

Body = Callable[[Any, Any], Any]


def _found(values: torch.Tensor, body: Body, field: int = 64, fraction_bits: int = 18) -> str:
    model = TokenRows(values, body)
    check = RangeCheck(field, fraction_bits)
    live = lower(partition(model, model.logits_graph(), model.ids, check))
    try:
        check.raise_first(live.executed, live.weights)
    except LoweringError as error:
        return str(error)
    return ""


LARGE = torch.tensor([[6000.0, -6000.0, 1.0, 2.0]])


@pytest.mark.parametrize(
    ("values", "body", "words"),
    [
        (LARGE, lambda x, m: aten.mul.Tensor(x, x), "result of aten.mul"),
        (LARGE * 10, lambda x, m: aten.layer_norm.default(x, [4]), "sum of squares of aten.layer_norm"),
        (LARGE / 20, lambda x, m: aten.layer_norm.default(x, [4]), "variance of aten.layer_norm"),
        (LARGE / 20, lambda x, m: aten.softmax.int(x, -1), "spread of a row of scores of aten.softmax"),
        (LARGE.abs() * 100, lambda x, m: aten.sqrt.default(x), "argument of aten.sqrt"),
        (LARGE * 100, lambda x, m: aten.reciprocal.default(x), "divisor of aten.reciprocal"),
        (LARGE, lambda x, m: aten.exp.default(x), "argument of aten.exp"),
        (torch.tensor([[20.0]]), lambda x, m: aten.exp.default(x), "result of aten.exp"),
        (LARGE, lambda x, m: aten.mul.Scalar(x, -1e4), "result of aten.mul"),
        (LARGE, lambda x, m: aten.log.default(x), "result of aten.log"),
    ],
)
def test_too_large(values: torch.Tensor, body: Body, words: str) -> None:
    message = _found(values, body)
    assert words in message
    assert "wrap around silently" in message


@pytest.mark.parametrize(
    "body",
    [
        lambda x, m: aten.neg.default(x),
        lambda x, m: aten.layer_norm.default(aten.mul.Scalar(x, 0.01), [4]),
        lambda x, m: aten.softmax.int(aten.add.Tensor(x, torch.tensor([-1e9, 0.0, -torch.inf, -torch.inf])), -1),
    ],
)
def test_fits(body: Body) -> None:
    assert _found(LARGE, body) == ""


def test_limits_follow_the_format() -> None:
    values = torch.tensor([[3000.0]])
    assert _found(values, lambda x, m: aten.mul.Tensor(x, x)) == ""
    assert "2.097e+06" in _found(values, lambda x, m: aten.mul.Tensor(x, x), fraction_bits=20)
    assert _found(values * 1000, lambda x, m: aten.mul.Tensor(x, x), field=128, fraction_bits=26) == ""


def test_weights_are_checked_too() -> None:
    check = RangeCheck(64, 18)
    with pytest.raises(LoweringError, match=r"the server's w:head reaches 1e\+09"):
        check.raise_first((), {"w:head": torch.tensor([1e9]).numpy()})
