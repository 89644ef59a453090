"""Choices and arithmetic that work element by element: every spelling of an activation is found, no look-alike is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from aero_compile.frontend.pointwise import Classified, classify
from tests.support.wrapped_functions import canonical

Function = Callable[[Tensor], Tensor]

RELUS: tuple[Function, ...] = (
    lambda x: torch.where(x > 0, x, 0.0),
    lambda x: torch.where(x <= 0, torch.zeros_like(x), x),
    lambda x: x * (x > 0),
    lambda x: x * (x >= 0).to(x.dtype),
    lambda x: x * (x > 0).type_as(x),
    lambda x: x.masked_fill(x < 0, 0.0),
    lambda x: F.threshold(x, 0.0, 0.0),
    lambda x: x.clamp(min=0),
    lambda x: x.clamp_min(0.0),
    lambda x: torch.max(x, torch.zeros_like(x)),
    lambda x: torch.maximum(torch.tensor(0.0), x),
    lambda x: -torch.minimum(-x, torch.tensor(0.0)),
    lambda x: 0.5 * (x + x.abs()),
    lambda x: x * (torch.sign(x) + 1) / 2,
    lambda x: x * torch.heaviside(x, torch.ones((), dtype=x.dtype)),
    lambda x: x - x.clamp(max=0),
)
LEAKY: tuple[Function, ...] = (
    lambda x: torch.where(x > 0, x, 0.1 * x),
    lambda x: torch.maximum(x, 0.2 * x),
    lambda x: x.clamp(min=0) + 0.3 * x.clamp(max=0),
    lambda x: x * torch.where(x < 0, 0.01, 1.0),
    lambda x: 0.55 * x + 0.45 * x.abs(),
)


def test_relus_in_many_spellings() -> None:
    """In one graph; `canonical` checks that the function is the same to 1e-12."""
    kinds = canonical(lambda _, x: torch.stack([f(x + i) for i, f in enumerate(RELUS)]).sum(0))
    assert kinds["relu"] == len(RELUS)
    left = {"gt", "ge", "lt", "le", "where", "masked_fill", "abs", "sign", "heaviside", "maximum", "minimum", "clamp"}
    assert not left & set(kinds)


def test_leaky_relus_in_many_spellings() -> None:
    kinds = canonical(lambda _, x: torch.stack([f(x + i) for i, f in enumerate(LEAKY)]).sum(0))
    assert kinds["leaky_relu"] == len(LEAKY)


@pytest.mark.parametrize(
    "function", [F.hardswish, lambda x: x * F.relu6(x + 3) / 6, lambda x: x * (x / 6 + 0.5).clamp(0, 1)]
)
def test_hardswish(function: Function) -> None:
    assert classify(function, (3.0, 6.0, 0.5, 1.0)) == Classified("hardswish", (), 1.0)


@pytest.mark.parametrize(
    ("function", "literals"),
    [
        (lambda x: torch.where(x > 1e-3, x, 0.0), (1e-3,)),
        (lambda x: torch.where(x > 50.01, x + 1, x.relu()), (50.01, 1.0)),
        (lambda x: x.clamp(0.0, 100.0), (0.0, 100.0)),
        (lambda x: x.clamp(0.0, 5e5), (0.0, 5e5)),
        (lambda x: torch.where(x > 0, x, 0.1 * x - 1e-5), (0.1, 1e-5)),
        (lambda x: torch.where(x > 2.003, x, 0.1 * x), (2.003, 0.1)),
        (torch.abs, ()),
        (lambda x: x, ()),
        (lambda x: (x > 0).double(), (0.0,)),
        (lambda x: x * ((x > 0) | (x < -1)), (0.0, -1.0)),
        (lambda x: x > 0, (0.0,)),
    ],
)
def test_look_alikes(function: Function, literals: tuple[float, ...]) -> None:
    assert classify(function, literals) is None


def test_an_op_is_not_found_in_itself() -> None:
    """Nor a factor of it: recognition ends."""
    kinds = canonical(lambda _, x: 2.0 * F.relu(x) + torch.sigmoid(x) / 3 - torch.square(F.relu(x)))
    assert (kinds["relu"], kinds["sigmoid"], kinds["square"]) == (2, 1, 1)


@pytest.mark.parametrize("factor", [2.0, -0.5, 1e-3, 1e4])
def test_a_factor_of_an_activation_is_found(factor: float) -> None:
    assert classify(lambda x: factor * F.gelu(x), ()) == Classified("gelu", ("none",), factor)


def test_rounding_survives() -> None:
    """A cast to integers and back is no cast between floating-point types."""
    kinds = canonical(lambda _, x: (7 * x).to(torch.int64).to(x.dtype))
    assert kinds["to"] + kinds["type_as"] + kinds["_to_copy"] == 2
