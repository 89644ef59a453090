"""The benchmark of a lookup prints its bytes and its error."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.lookup import main


def test_bytes_seconds_and_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lookup.json"
    assert main(["--vocabulary", "20", "--width", "9", "--tokens", "3", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"the client +98\.5 kB +\d\.\d{4} s", printed)  # 3 · 8 · (4096 + 9)
    assert re.search(r"off by at most 0\.0\d+ units", printed)
    written = json.loads(path.read_text())
    key = 8 * (4096 + 20 * 9) + 32  # a polynomial, the rows, a seed
    assert [row["bytes"] for row in written["rows"]] == [key, 98_520, 0]
    assert written["error_units"] < 0.1
    assert written["config"] == {"vocabulary": 20, "width": 9, "tokens": 3}
