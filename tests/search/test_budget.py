"""Budgets as text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aero_compile.errors import InputError
from aero_compile.search.costs import Budget, amount, parse_budget


@pytest.mark.parametrize(
    ("text", "measure", "limit"),
    [
        ("0.8 GB", "bytes", 8e8),
        ("800MB", "bytes", 8e8),
        ("1_000 kB", "bytes", 1e6),
        ("2 KiB", "bytes", 2048),
        ("1e3 b", "bytes", 1000),
        ("40 s", "seconds", 40),
        ("1.5 min", "seconds", 90),
        ("900 rounds", "rounds", 900),
        ("5,000 messages", "messages", 5000),
    ],
)
def test_amounts_and_units(text: str, measure: str, limit: float) -> None:
    assert parse_budget(text) == Budget(measure, limit)


@pytest.mark.parametrize("text", ["", "12", "GB", "-1 GB", "0 GB", "1 parsec", "one GB", "1e999 GB", "1 GB extra"])
def test_no_budget(text: str) -> None:
    with pytest.raises(InputError, match="budget"):
        parse_budget(text)


def test_one_is_singular_and_little_is_not_nothing() -> None:
    assert [amount("rounds", 1.0), amount("messages", 2.0), amount("seconds", 0.0012)] == [
        *("1 round", "2 messages", "0.0012 s")
    ]


def test_amounts_are_read_back() -> None:
    few = (("seconds", 3e-6), ("rounds", 1.0))
    for measure, value in (("bytes", 123456789.0), ("seconds", 12.34), ("rounds", 77.0), ("messages", 1234.0), *few):
        found = parse_budget(amount(measure, value))
        assert found.measure == measure
        assert found.limit == pytest.approx(value, rel=5e-3)


@given(st.floats(1e-3, 1e18) | st.integers(1, 10**18) | st.sampled_from([np.float32(5.0), np.int64(7)]))
def test_a_number_is_one_of_bytes(value: Any) -> None:
    found = parse_budget(value)
    assert found.measure == "bytes"
    assert found.limit == pytest.approx(float(value))


@pytest.mark.parametrize("value", [0, -1, -2.5, math.inf, math.nan, True, None])
def test_numbers_that_are_no_budget(value: Any) -> None:
    with pytest.raises(InputError, match="budget"):
        parse_budget(value)
