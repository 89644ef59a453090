"""Programs of a generation on disk, and what is refused of a folder that somebody else wrote."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from aero_compile.errors import InputError
from aero_compile.runtime.generation.programs import INDEX, Programs, check
from tests.support.tiny_generation import CHECKS, FILLS, ROOM, VOCABULARY, small_compiled

pytest.importorskip("spu")


@pytest.fixture
def programs() -> Programs:
    return small_compiled().programs


def test_what_is_saved_is_read(programs: Programs, tmp_path: Path) -> None:
    programs.save(tmp_path)
    found = Programs.load(tmp_path)
    assert found == programs
    assert found.digest == programs.digest
    assert (found.room, found.vocabulary, tuple(found.fills), tuple(found.checks)) == (ROOM, VOCABULARY, FILLS, CHECKS)
    assert {path.stem for path in tmp_path.iterdir()} == {"generation", *(p.digest for p in programs.all.values())}


def test_one_program_serves_all_positions(programs: Programs) -> None:
    """Most codes are shared by the programs of one position: they differ by the last block and the logits."""
    step, advance = programs.step.codes.keys(), programs.advance.codes.keys()
    assert len(step & advance) > len(advance) / 2
    assert programs.step.positions == programs.advance.positions == ROOM


def test_plans(programs: Programs) -> None:
    assert programs.plan(2, 0) == [("3", 2)]
    assert programs.plan(3, 0) == [("3", 3)]
    assert programs.plan(4, 0) == [("5", 4)]
    assert programs.plan(7, 0) == [("5", 5), ("advance", 1), ("advance", 1)]
    assert programs.plan(1, 0) == [("advance", 1)]
    assert programs.plan(2, 3) == [("advance", 1), ("advance", 1)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {"advance": p.step}, "'advance' does not compute 1 positions"),
        (lambda p: {"step": p.advance}, "'step' does not compute 1 positions"),
        (lambda p: {"fills": {3: p.fills[5]}}, "'3' does not compute 3 positions"),
        (lambda p: {"fills": {1: p.advance}}, "computes at 8 positions"),
        (lambda p: {"checks": {3: p.fills[3]}}, "'check-3' does not compute 3 positions"),
        (lambda p: {"fills": {3: p.checks[3]}}, "'3' does not compute 3 positions"),
        (lambda p: {"checks": {2: p.checks[3]}}, "'check-2' does not compute 2 positions"),
        (lambda p: {"fills": {3: dataclasses.replace(p.fills[3], field=32)}}, "'3' does not go on"),
        (lambda p: {"fills": {3: dataclasses.replace(p.fills[3], cached=())}}, "'3' does not go on"),
    ],
)
def test_programs_that_do_not_go_on_from_each_other_are_refused(programs: Programs, change: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(dataclasses.replace(programs, **change(programs)))


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"format": 2, "programs": {}}',
        '{"format": 1, "programs": {"step": "../../etc/passwd", "advance": "x"}}',
        '{"format": 1, "programs": {"step": 1, "advance": 2}}',
        '{"format": 1, "programs": {"step": "a", "advance": "b", "many": "c"}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_index_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(InputError):
        Programs.load(tmp_path)


def test_a_program_under_anothers_digest_is_refused(programs: Programs, tmp_path: Path) -> None:
    programs.save(tmp_path)
    (tmp_path / f"{programs.step.digest}.json").write_bytes(programs.advance.to_bytes())
    with pytest.raises(InputError, match="is not the program that it is named after"):
        Programs.load(tmp_path)
    (tmp_path / f"{programs.step.digest}.json").unlink()
    with pytest.raises(InputError, match="not a readable program"):
        Programs.load(tmp_path)


def test_a_program_of_the_version_before_is_read(tmp_path: Path) -> None:
    """It has nothing cached."""
    from tests.support.runtime_tiny import tiny_compiled

    program = tiny_compiled().program
    content = json.loads(program.to_bytes())
    for name in ("cached", "results", "by_position", "opens"):
        del content[name]
    (tmp_path / "old.json").write_text(json.dumps({**content, "format": 6}))
    assert type(program).load(tmp_path / "old.json") == program
