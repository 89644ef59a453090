"""Activations: every chain of squares keeps its published error, in exact arithmetic and between two parties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from aero_compile.errors import InputError
from aero_compile.runtime.arithmetic.approximations import Precision, activation, approximations, left_over, squares_for
from tests.runtime.two_parties import in_two_parties

pytest.importorskip("jax")

NAMES = ("gelu", "gelu_tanh", "silu", "sigmoid", "tanh")
PRECISIONS: tuple[Precision, ...] = ("low", "default", "high")
BOUNDS = {"low": 2.5e-3, "default": 1e-3, "high": 2e-4}


def reference(name: str, x: Any) -> Any:
    """PyTorch's function, float64."""
    value = torch.tensor(x, dtype=torch.float64)
    if name.startswith("gelu"):
        return torch.nn.functional.gelu(value, approximate="tanh" if name == "gelu_tanh" else "none").numpy()
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": torch.nn.functional.silu,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
    }
    return functions[name](value).numpy()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_error_in_exact_arithmetic_is_the_published_one(name: str, precision: Precision) -> None:
    import jax

    known = approximations(precision)[name]
    assert known.formula_error is not None
    x = np.linspace(*known.domain, 20_001)
    with jax.experimental.enable_x64():  # type: ignore[no-untyped-call, unused-ignore]
        error = np.abs(np.asarray(activation(name, jax.numpy.asarray(x), precision)) - reference(name, x)).max()
    assert error == pytest.approx(known.formula_error, rel=0.05)
    assert error <= known.fixed_point_error <= BOUNDS[precision]


@pytest.mark.parametrize("protocol", ["semi2k", pytest.param("cheetah", marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", ["low", "high"])
@pytest.mark.parametrize("name", NAMES)
def test_error_between_two_parties_stays_below_the_published_one(
    name: str, precision: Precision, protocol: str
) -> None:
    """The default precision is measured as an operator of a graph, in test_in_spu."""
    pytest.importorskip("spu")
    known = approximations(precision)[name]
    x = np.round(np.linspace(*known.domain, 2048) * 2**12) / 2**12
    found = in_two_parties(lambda secret: activation(name, secret, precision), x.reshape(8, 256), protocol)
    assert np.abs(found.ravel() - reference(name, x)).max() <= known.fixed_point_error


@pytest.mark.parametrize("name", NAMES)
def test_more_precision_never_costs_less(name: str) -> None:
    costs = [approximations(precision)[name].bytes_per_element for precision in PRECISIONS]
    assert costs == sorted(costs)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_left_over_vanishes_at_infinity(name: str) -> None:
    t = np.linspace(0, 40, 401)
    left = left_over(name, t)
    assert left[-1] == pytest.approx(0.0, abs=1e-15)
    above = t if name in ("gelu", "gelu_tanh", "silu") else 1.0
    np.testing.assert_allclose(above - left, reference(name, t), rtol=0, atol=1e-12)


def test_unknown_precision_is_named() -> None:
    with pytest.raises(InputError, match="medium"):
        squares_for("gelu", "medium")  # type: ignore[arg-type]
