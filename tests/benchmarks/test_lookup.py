"""The benchmark of a lookup prints its bytes and its error."""

from __future__ import annotations

import re

import pytest

from benchmarks.lookup import main


def test_bytes_seconds_and_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--vocabulary", "20", "--width", "9", "--tokens", "3"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"the client +98\.5 kB +\d\.\d{4} s", printed)  # 3 · 8 · (4096 + 9)
    assert re.search(r"off by at most 0\.0\d+ units", printed)
