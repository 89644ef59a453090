"""Exchanges of a rehearsal: what two parties get, rounding included, garbage beyond the range included."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aero_compile.runtime.online.exchanges import RehearsedExchanges
from aero_compile.runtime.online.scaling import MOST_BITS
from tests.support.budgets import MANY, many
from tests.support.kernel_sides import split
from tests.support.share_runs import drawn_products, truncated


@given(st.integers(1, MOST_BITS), st.integers(0, 61), st.integers(0, 2**32))
@many(max_examples=MANY)
def test_a_truncation_is_less_than_a_unit_off(bits: int, size: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    x = draw.integers(-(2**size), 2**size, 40, endpoint=True)
    found = RehearsedExchanges(draw).truncate(x.astype(np.uint64), bits).astype(np.int64)
    assert max(abs((int(y) << bits) - int(each)) for y, each in zip(found, x, strict=True)) < 1 << bits


@pytest.mark.parametrize("x", [7, 2**17, -(2**17) - 1, 2**40 + 5, 2**62 + 2**61, -(2**62) - 2**61])
def test_a_truncation_rounds_as_two_parties_do(x: int) -> None:
    """Of many shares of one number, each result comes as often; beyond the range these are wrong in the same way."""
    draw, count = np.random.default_rng(0), 20_000
    words = np.full(count, x, np.int64).astype(np.uint64)
    private, _ = truncated(split(words, draw), 18, drawn_products(count, draw))
    rehearsed = RehearsedExchanges(draw).truncate(words, 18).astype(np.int64)
    results = np.union1d(private, rehearsed)
    shares = [[float((found == each).mean()) for each in results] for found in (private, rehearsed)]
    np.testing.assert_allclose(shares[0], shares[1], atol=0.02)
