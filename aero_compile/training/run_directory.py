"""The folder of one training run: who it belongs to, what may continue it, and what is written there."""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from aero_compile.errors import OutputDirError
from aero_compile.files import write_atomically
from aero_compile.version import __version__

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
ENTROPIES_FILE = "entropies.jsonl"
ARTIFACT_FOLDER = "artifact"
_COMPLETE = "complete.json"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on (absent ones left out)."""
    found = {"python": platform.python_version(), "aero_compile": __version__}
    for package in ("torch", "transformers", "datasets", "tokenizers", "accelerate", "numpy", "spu"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_json(path: Path, content: Any) -> None:
    """Write JSON under a temporary name, then rename it into place."""
    write_atomically(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def finite_or_none(value: Any) -> Any:
    """The value with NaN and infinities (which JSON has not) as None, through dicts and lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_none(item) for item in value]
    return value


class RunDirectory:
    """Files of one run. Only the main process writes (``writes``); every process may ask and check."""

    def __init__(self, path: str | Path, *, writes: bool = True) -> None:
        self.path, self.writes = Path(path), writes
        self.record: dict[str, Any] = {}

    def check(self, resume: bool) -> None:
        """Raise OutputDirError unless a run may start (or, with ``resume``, go on) here. Writes nothing."""
        if self.path.exists() and not self.path.is_dir():
            raise OutputDirError(f"{self.path} is a file, not a folder")
        if not self.path.is_dir() or not any(self.path.iterdir()):
            return
        known = self.read_record()
        if known is None:
            raise OutputDirError(
                f"{self.path} is not empty and holds no training run ({RUN_FILE} is missing): "
                "choose another --output-dir"
            )
        if not resume:
            raise OutputDirError(
                f"{self.path} holds a training run ({known.get('status', 'unknown state')}): "
                "continue it with --resume or choose another --output-dir"
            )

    def read_record(self) -> dict[str, Any] | None:
        """The content of ``run.json``, or None where there is none."""
        try:
            content = json.loads((self.path / RUN_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise OutputDirError(f"{self.path / RUN_FILE} cannot be read: {error}") from error
        return content if isinstance(content, dict) else None

    def check_identity(self, identity: Mapping[str, Any]) -> None:
        """Raise OutputDirError, naming each difference, if the run here was started with other settings."""
        known = self.read_record()
        if known is None:
            return
        before = known.get("identity", {})
        now = json.loads(json.dumps(identity))
        differences = [
            f"{key} was {before.get(key)!r}, now {now.get(key)!r}"
            for key in sorted({*before, *now})
            if before.get(key) != now.get(key)
        ]
        if differences:
            raise OutputDirError(f"{self.path} holds another run: {'; '.join(differences)}")

    def start(self, record: Mapping[str, Any]) -> None:
        """Create the folder and ``run.json``; a resumed run keeps its start and counts its sessions."""
        if not self.writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        before = self.read_record() or {}
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self.record = {
            **record,
            "status": "running",
            "started": before.get("started", now),
            "sessions": [*before.get("sessions", []), {"started": now, "command": sys.argv}],
            "versions": versions(),
        }
        write_json(self.path / RUN_FILE, finite_or_none(self.record))

    def finish(self, status: str, **results: Any) -> None:
        """Write how the run ended into ``run.json``."""
        if self.writes and self.record:
            self.record |= {"status": status, "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **results}
            write_json(self.path / RUN_FILE, finite_or_none(self.record))

    def append(self, file: str, record: Mapping[str, Any]) -> None:
        """Add one line to a ``.jsonl`` file."""
        if self.writes:
            line = json.dumps(finite_or_none(dict(record))) + "\n"
            with (self.path / file).open("a", encoding="utf-8") as stream:
                stream.write(line)

    def read_lines(self, file: str) -> list[dict[str, Any]]:
        """The records of a ``.jsonl`` file; a torn last line (a killed run) is left out."""
        path = self.path / file
        records = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
            try:
                records.append(json.loads(line))
            except ValueError:
                continue
        return records

    def rewind(self, step: int) -> None:
        """Forget what was recorded after ``step``: a resumed run records it again."""
        for file in (METRICS_FILE, ENTROPIES_FILE):
            if self.writes and (self.path / file).is_file():
                kept = [r for r in self.read_lines(file) if r.get("step", 0) <= step and r.get("event") != "end"]
                write_atomically(self.path / file, "".join(json.dumps(record) + "\n" for record in kept))

    def mark_complete(self, step: int) -> None:
        """Note that ``checkpoint-<step>`` was written to its end."""
        folder = self.path / f"checkpoint-{step}"
        if self.writes and folder.is_dir():
            write_json(folder / _COMPLETE, {"step": step})

    def unmark(self, folder: str | Path) -> None:
        """Take the mark of completeness from a checkpoint that is about to be written again."""
        if self.writes:
            (Path(folder) / _COMPLETE).unlink(missing_ok=True)

    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint that was written to its end; one cut off by a crash does not count."""
        if not self.path.is_dir():
            return None
        found = [p for p in self.path.glob("checkpoint-*") if is_checkpoint(p)]
        return max(found, key=lambda p: int(p.name.rpartition("-")[2]), default=None)

    def resume_point(self, resume: str | None) -> Path | None:
        """The checkpoint meant by ``--resume`` (a path, or "last"), or None to start from the beginning."""
        if resume is None:
            return None
        if resume.lower() in ("last", "true"):
            return self.last_checkpoint()
        path = Path(resume)
        if not is_checkpoint(path):
            raise OutputDirError(f"--resume {path}: this is no complete checkpoint of a retraining run")
        return path


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint of a retraining run, written to its end."""
    return path.name.rpartition("-")[2].isdigit() and (path / _COMPLETE).is_file()
