"""The comparison of products with the server's matrices, as a script and on a small matrix."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import products


def test_help(root: Path) -> None:
    command = [sys.executable, "benchmarks/products.py", "--help"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "SHAPE" in done.stdout


@pytest.mark.parametrize("shape", ["8", "8x", "0x4", "8x4x2", "ax4"])
def test_a_shape_is_two_numbers(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert products.main([shape]) == 2
    assert "INNERxCOLUMNS" in capsys.readouterr().err


def test_both_ways_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("spu")
    file = tmp_path / "found.json"
    assert products.main(["24x40", "--rows", "3", "--json", str(file)]) == 0
    rows = {row["way"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["SPU"]["rows"] == 3
    assert rows["batch"]["rows"] == 4096
    for row in rows.values():
        assert row["matrix"] == "24x40"
        assert min(row["bytes"], row["seconds"]) > 0
        assert row["memory"] >= 0  # growth over what the process had held before
