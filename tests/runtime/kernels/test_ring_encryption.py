"""Products of polynomials against their definition, and what is drawn against its distribution."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from aero_compile.runtime.kernels.ring_algebra import (
    LARGEST_DEGREE,
    LARGEST_ERROR,
    errors,
    hashed,
    ternary,
    times,
    uniform,
)


def naive(a: list[int], small: list[int]) -> list[int]:
    """The product modulo X^N + 1 and 2^64, term by term."""
    found = [0] * len(a)
    for i, left in enumerate(a):
        for j, right in enumerate(small):
            sign = 1 if i + j < len(a) else -1
            found[(i + j) % len(a)] += sign * left * right
    return [each % 2**64 for each in found]


@pytest.mark.parametrize("degree", [2, 8, 64])
def test_products_are_those_of_the_definition(degree: int) -> None:
    draw = np.random.default_rng(degree)
    a, small = draw.integers(2**64, size=(5, degree), dtype=np.uint64), draw.integers(-1, 2, (5, degree))
    a[1], a[2], small[3] = 2**64 - 1, 2**63 + 2**31, 1
    for row, factor, found in zip(a, small, times(a, small), strict=True):
        assert found.tolist() == naive(row.tolist(), factor.tolist())
    np.testing.assert_array_equal(times(a[0], small), [times(a[0], each) for each in small])


@pytest.mark.parametrize("word", [2**31 - 1, 2**31, 2**63 - 1, 2**63 + 2**31, 0x7FFFFFFF7FFFFFFF, 0x8000000080000000])
def test_they_are_exact_for_the_largest_halves_and_the_highest_degree(word: int) -> None:
    """By ones, a coefficient is the sum of those up to it less the sum of the rest."""
    a = np.full(LARGEST_DEGREE, word, np.uint64)
    wanted = np.uint64(2) * np.cumsum(a, dtype=np.uint64) - a.sum(dtype=np.uint64)
    np.testing.assert_array_equal(times(a, np.ones(LARGEST_DEGREE, np.int64)), wanted)


def test_what_is_drawn() -> None:
    small, noise = ternary(os.urandom, 300, 400), errors(os.urandom, 300, 400)
    counts = np.bincount(small.ravel() + 1, minlength=3)
    assert np.abs(counts - 40_000).max() < 6 * 164
    assert np.abs(noise).max() <= LARGEST_ERROR
    assert noise.var() == pytest.approx(12, rel=0.03)
    assert abs(noise.mean()) < 6 * 12**0.5 / 120_000**0.5
    assert uniform(os.urandom, 3, 5).shape == (3, 5)


def test_errors_reach_their_bound_and_no_further() -> None:
    def extreme(size: int) -> bytes:
        return b"\xff" * (size // 2) + b"\0" * (size - size // 2)

    np.testing.assert_array_equal(errors(extreme, 2, 3), np.full((2, 3), LARGEST_ERROR))


def test_hashed_parts_follow_from_seed_and_number_alone() -> None:
    seed: Any = uniform(os.urandom, 4)
    np.testing.assert_array_equal(hashed(seed, 1, 64), hashed(seed, 1, 128)[:64])
    assert not np.intersect1d(hashed(seed, 1, 64), hashed(seed, 2, 64)).size
    assert not np.intersect1d(hashed(seed, 1, 64), hashed(seed + np.uint64(1), 1, 64)).size
