"""The benchmark of tokens: what it writes and prints, and what it refuses before anything long has begun."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import generation

COST: dict[str, float] = {"bytes": 2_000_000, "messages": 1_234, "seconds": 1.5}
NOTHING = {"bytes": 0, "messages": 0, "seconds": 0.0}
PREDICTED: dict[str, object] = {"room": 8, "estimate": COST, "estimate_offline": NOTHING}


def test_the_table_says_what_was_measured_and_what_was_estimated() -> None:
    """The last token or check counts, and what the prompt takes is with the first."""
    first: dict[str, object] = {"estimate_first": COST, "estimate_first_offline": {**NOTHING, "bytes": 300_000}}
    measured: dict[str, object] = {
        "tokens": [COST, NOTHING, {**COST, "messages": 56}],
        "prompt": {**COST, "messages": 766},
    }
    measured |= {"logit_error": 1e-4}
    check: dict[str, object] = {"estimate_check": {**COST, "messages": 78}, "estimate_check_offline": NOTHING}
    table = generation.text([PREDICTED | first | measured, PREDICTED, PREDICTED | check | measured]).splitlines()
    assert len(table) == 6
    assert "2,000" in table[2]  # messages of the prompt and of the first token
    assert "300 kB" in table[2]
    assert "56" in table[3]
    assert "1.0e-04" in table[3]
    assert "–" in table[4]
    assert "a check" in table[5]
    assert "78" in table[5]


def test_a_room_beyond_the_positions_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Before a model is built."""
    assert generation.main(["--room", "8", "2000"]) == 2
    assert "2000 is longer than the 128 positions of mini" in capsys.readouterr().err


def test_a_text_beyond_the_room_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert generation.main(["--layers", "1", "--room", "8", "--prompt", "7", "--tokens", "3"]) == 2
    assert "--prompt 7 and --tokens 3 do not fit a room for 8" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--prompt", "4", "--offline"], ["--check", "2"]])
def test_measured_and_estimated_agree(more: list[str], tmp_path: Path) -> None:
    """In Cheetah: bytes within a hundredth, messages to the last one."""
    out = tmp_path / "rows.json"
    assert generation.main(["--layers", "1", "--room", "8", "--tokens", "2", "--json", str(out), *more]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    checks = "--check" in more
    token, predicted = row["tokens"][0 if checks else -1], row["estimate_check" if checks else "estimate"]
    assert row["right"] == row["guessed"] == int(checks)
    assert token["messages"] == predicted["messages"]
    assert token["bytes"] == pytest.approx(predicted["bytes"], rel=0.01)
    assert row["same_text"]
    assert row["logit_error"] < 1e-2
    assert bool(row["offline"]["bytes"]) == ("--offline" in more)
    if "--prompt" in more:
        to_first = row["prompt"]["messages"] + row["tokens"][0]["messages"]
        assert to_first == row["estimate_first"]["messages"]
