"""The fitting behind the cost table, on numbers whose fit is known (measuring itself takes minutes)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib.calibrate_cases import profiles
from benchmarks.lib.calibrate_fit import non_negative, table_of

PROFILE = """
2026-01-01 [info] HLO profiling: total time 0.5
2026-01-01 [info] - pphlo.less, executed 1 times, duration 0.25s, send bytes 10 recv bytes 20, send actions 3, recv actions 4
2026-01-01 [info] HAL profiling: total time 0.5
2026-01-01 [info] - f_less, executed 1 times, duration 0.25s, send bytes 10 recv bytes 20, send actions 3, recv actions 4
2026-01-01 [info] MPC profiling: total time 0.5
2026-01-01 [info] - msb_a2b, executed 2 times, duration 1.5e-03s, send bytes 10 recv bytes 20, send actions 3, recv actions 4
"""  # noqa: E501


def test_profile_by_layers() -> None:
    found = profiles(PROFILE)
    assert set(found["HLO"]) == {"pphlo.less"}
    expected = {"count": 2, "seconds": 1.5e-3, "sent": 10, "received": 20, "sends": 3, "receives": 4}
    assert found["MPC"] == {"msb_a2b": expected}


def test_non_negative_least_squares() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        matrix = generator.uniform(0, 1, (30, 5)) * [1, 10, 1e4, 1e-3, 1]
        truth = generator.uniform(0, 1, 5) * generator.integers(0, 2, 5)
        assert non_negative(matrix, matrix @ truth) == pytest.approx(truth, abs=1e-6, rel=1e-4)
        target = generator.normal(size=30)
        found = non_negative(matrix, target)
        gradient = matrix.T @ (matrix @ found - target) / np.abs(matrix).max(axis=0)
        assert (found >= 0).all()
        assert (gradient > -1e-6).all()  # no coefficient would rather grow
        assert np.abs(gradient[found > 0]).max(initial=0) < 1e-6


def test_missing_records_are_named() -> None:
    with pytest.raises(ValueError, match="nothing was measured for trunc"):
        table_of([], {}, 2, {}, {}, "today")


def test_help(root: Path) -> None:
    command = [sys.executable, "benchmarks/calibrate.py", "--help"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout
