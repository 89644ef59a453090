"""The benchmark of tokens: what it writes and prints, and what it refuses before anything long has begun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import generation

COST = {"bytes": 2_000_000, "messages": 1_234, "seconds": 1.5}
NOTHING = {"bytes": 0, "messages": 0, "seconds": 0.0}
PREDICTED = {"room": 8, "estimate": COST, "estimate_offline": NOTHING}


def test_the_table_has_a_row_for_each_room() -> None:
    """The last token counts, and of what was prepared for all of them its share."""
    measured = {"tokens": [NOTHING, COST], "offline": {**NOTHING, "bytes": 600_000}, "logit_error": 1e-4}
    table = generation.text([PREDICTED | measured, PREDICTED]).splitlines()
    assert len(table) == 4
    assert "1,234" in table[2]
    assert "300 kB" in table[2]
    assert "1.0e-04" in table[2]
    assert "1,234" in table[3]
    assert "–" in table[3]


def test_a_room_beyond_the_positions_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Before a model is built."""
    assert generation.main(["--room", "8", "2000"]) == 2
    assert "2000 is longer than the 128 positions of mini" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--offline"]])
def test_measured_and_estimated_agree(more: list[str], tmp_path: Path) -> None:
    """In Cheetah: bytes within a hundredth, messages to the last one."""
    out = tmp_path / "rows.json"
    assert generation.main(["--layers", "1", "--room", "8", "--tokens", "2", "--json", str(out), *more]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    token, predicted = row["tokens"][-1], row["estimate"]
    assert token["messages"] == predicted["messages"]
    assert token["bytes"] == pytest.approx(predicted["bytes"], rel=0.01)
    assert row["same_text"]
    assert row["logit_error"] < 1e-2
    assert bool(row["offline"]["bytes"]) == bool(more)
