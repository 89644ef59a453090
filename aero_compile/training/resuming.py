"""`--resume` alone: the flags that a run was started with stand in its `run.json`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aero_compile.errors import InputError, OutputDirError
from aero_compile.training.checkpoints import step_of
from aero_compile.training.given_flags import SECRET, given_flags, without
from aero_compile.training.run_directory import RUN_FILE, RunDirectory
from aero_compile.training.setup.arguments import RetrainArguments

_OF_A_SESSION = ("resume", "resume_from_checkpoint", "output_dir", *SECRET)
"""Flags that do not belong to a run, but to one session of it."""

logger = logging.getLogger("aero_compile.retrain")


def with_flags_of_run(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The whole command line, and what of it a later `--resume` needs.

    What is resumed gets the flags that it was started with in front of those given, which replace them; whether they
    may is decided where the run's settings are compared. `--resume RUN` is `--resume --output-dir RUN`.

    Raises:
        InputError: `--resume` names the folder of a run, and `--output-dir` another one.
        OutputDirError: a `run.json` that cannot be read.
    """
    given = given_flags(arguments)
    if not {"resume", "resume_from_checkpoint"} & set(given):
        return list(arguments), without(arguments, _OF_A_SESSION)
    arguments = _in_its_folder(arguments, given)
    given = given_flags(arguments)
    flags = _flags_of(_record(Path(given.get("output_dir") or _default_folder()), _named(given)))
    whole = [*flags, *arguments]
    return whole, without(whole, _OF_A_SESSION)


def _default_folder() -> str:
    return str(RetrainArguments.output_dir)


def _named(given: dict[str, str]) -> Path | None:
    """The checkpoint or folder that `--resume` names; None for the last checkpoint."""
    text = given.get("resume") or given.get("resume_from_checkpoint") or "last"
    return None if text.lower() in ("last", "true") else Path(text).expanduser()


def _in_its_folder(arguments: Sequence[str], given: dict[str, str]) -> list[str]:
    """The command line with the folder of the run that `--resume` names, by itself or by a checkpoint."""
    named, folder = _named(given), given.get("output_dir")
    if named is None:
        return list(arguments)
    if step_of(named) is None and (named / RUN_FILE).is_file():
        if folder is not None and Path(folder).expanduser().resolve() != named.resolve():
            raise InputError(
                f"--resume {named} is a run, and --output-dir {folder} another folder: leave one out, or name a "
                f"checkpoint of it ({named}/checkpoint-N)"
            )
        rest = without(arguments, ("resume", "resume_from_checkpoint", "output_dir"))
        return [*rest, "--output-dir", str(named), "--resume"]
    if folder is None and (named.parent / RUN_FILE).is_file():
        return [*arguments, "--output-dir", str(named.parent)]
    return list(arguments)


def _record(folder: Path, named: Path | None) -> dict[str, Any]:
    """What is known of the run in a folder; where none is, of the one whose checkpoint is named."""
    record = RunDirectory(folder.expanduser()).read_record()
    if record is None and named is not None:
        with contextlib.suppress(OutputDirError):  # its flags may be given instead
            record = RunDirectory(named.parent).read_record()
    return record or {}


def _flags_of(record: dict[str, Any]) -> list[str]:
    flags = record.get("flags")
    if isinstance(flags, list) and all(isinstance(flag, str) for flag in flags):
        return flags
    if record:
        logger.info("%s keeps no flags of this run: those given here are all", RUN_FILE)
    return []
