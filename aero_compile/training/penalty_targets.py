"""Thresholds of a reference run: `--thresholds-from RUN` takes the entropies that its heads ended with."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aero_compile.errors import InputError
from aero_compile.training.run_directory import ENTROPIES_FILE, RunDirectory

Table = list[list[float]]


@dataclass(frozen=True)
class PenaltyTargets:
    """Thresholds `[L][H]`, fractions of the largest entropy, and the step of the reference run they are of."""

    thresholds: Table
    step: int

    @property
    def fingerprint(self) -> str:
        """A short digest: a run is not resumed with other targets."""
        return hashlib.sha256(json.dumps(self.thresholds).encode()).hexdigest()[:12]


def read_targets(folder: str | Path, *, by_row: bool) -> PenaltyTargets:
    """Read the last entropies on held-out text of the run in `folder`, as fractions of the largest entropy.

    `by_row`: of log(i + 1) for each row i, as `--max-entropy row` counts, instead of log T, T being the run's context.

    Raises:
        InputError: a folder without a run, without entropies, or without those of rows where these are needed.
    """
    path = Path(folder)
    run = RunDirectory(path)
    context = ((run.read_record() or {}).get("identity") or {}).get("context")
    lines = [line for line in run.read_lines(ENTROPIES_FILE) if line.get("split") == "validation"]
    if not lines or not isinstance(context, int) or context < 2:
        raise InputError(
            f"--thresholds-from {path}: no headwise entropies of a retraining run are there ({ENTROPIES_FILE}); name "
            "the --output-dir of a run that was trained or measured (--max-steps 0)"
        )
    last = lines[-1]
    if by_row and "row_shares" not in last:
        raise InputError(
            f"--thresholds-from {path}: that run was recorded before entropies were measured row by row, which "
            "--max-entropy row needs; measure it anew, or leave --max-entropy row out"
        )
    table = last["row_shares"] if by_row else last["entropies"]
    largest = 1.0 if by_row else math.log(context)
    thresholds = [[_fraction(value, largest, path) for value in row] for row in table]
    return PenaltyTargets(thresholds, int(last["step"]))


def _fraction(value: Any, largest: float, path: Path) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(f"--thresholds-from {path}: its last entropies are not finite; name a run that ended well")
    return round(min(1.0, max(0.0, value / largest)), 6)
