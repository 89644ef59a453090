"""A run's folder: what may change in it, and folders of others are left alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from aero_compile.errors import OutputDirError
from aero_compile.retrain import retrain
from aero_compile.training.run_directory import RunDirectory
from tests.support.tiny_runs import (
    blocks,
    contents,
    evaluating,
    finished,
    regularized,
    same_tensors,
    softmax_only,
    stopped,
)


def test_settings_that_may_change_are_recorded_with_their_step(tmp_path: Path) -> None:
    folder = shutil.copytree(stopped(), tmp_path / "run")
    result = retrain(
        regularized(resume="last"), evaluating(folder, logging_steps=1), model=softmax_only(), datasets=blocks()
    )
    assert same_tensors(result.model, finished().model)
    sessions = json.loads((folder / "run.json").read_text())["sessions"]
    assert [(each["step"], each["changed"]) for each in sessions] == [(0, {}), (4, {"logging_steps": [2, 1]})]


def test_output_directories_of_others_are_left_alone(tmp_path: Path) -> None:
    def refused(folder: Path, match: str, **changes: Any) -> None:
        before = contents(folder)
        with pytest.raises(OutputDirError, match=match):
            retrain(regularized(**changes), evaluating(folder), model=softmax_only(), datasets=blocks())
        assert contents(folder) == before

    folder = shutil.copytree(stopped(), tmp_path / "run")
    refused(folder, r"holds a training run \(interrupted\): continue it with --resume")
    refused(folder, r"another run: gamma was 0.1, now 0.3", resume="last", gamma=0.3)
    refused(folder, "lambda was 0.1, now 0.2", resume="last", entropy_weight=0.2)
    refused(folder, "no checkpoint-N folder", resume=str(tmp_path / "checkpoint-9"))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    refused(foreign, "holds no training run", resume="last")
    refused(foreign, "holds no training run")
    (folder / "run.json").write_text("{")
    refused(folder, "cannot be read")
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(OutputDirError, match="is a file"):
        RunDirectory(file).check(resume=False)


def test_two_do_not_train_in_one_folder_at_a_time(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run")
    record: dict[str, Any] = {"training_arguments": {}}
    first.start(record)
    with pytest.raises(OutputDirError, match="is in use: another process trains there"):
        second.start(record)
    assert len(json.loads((tmp_path / "run" / "run.json").read_text())["sessions"]) == 1
    first.finish("finished")
    second.start(record)
    assert len(json.loads((tmp_path / "run" / "run.json").read_text())["sessions"]) == 2
    second.finish("finished")
