"""Stages of a removal: passes that are applied in the course of a run, each with steps of its own to recover in.

A stage is written `STEPS: PASSES`, or `STEPS@LEARNING_RATE: PASSES`; stages are divided by `;` or stand in lines:

    100:                                     train the model as it is
    20: each freeze-layer-norm ffn           the norms before FFNs, one at a time, 20 steps each
    20: each freeze-layer-norm qk,v,final    then other norms, in this order
    200: blend-activation                    activations blended out over 200 steps, 1 to 0
    100@1e-4: softmax-temperature            a temperature comes in, at another learning rate

`each PASS PARTS` is `removal_schedule`: a stage for each norm. Blended activations are gone when their stage ends. In a
JSON file a stage is an object of `steps`, `passes` and, if wanted, `learning_rate` and `each` (names of parts).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from torch import Tensor

from aero_compile.errors import InputError, RecipeError, first_line
from aero_compile.graph_pass import GraphPass
from aero_compile.model import TransformedModel
from aero_compile.passes._norms import NormPass
from aero_compile.passes.blend_activation import BlendActivation
from aero_compile.pipeline import run_passes
from aero_compile.recipe.labels import split_terms
from aero_compile.recipe.recipe import parse_pass
from aero_compile.recipe.removal_schedules import removal_schedule

_STAGE = re.compile(r"(\d+)\s*(?:@\s*([^:\s]+)\s*)?:(.*)", re.DOTALL)
_EACH = re.compile(r"each\s+(\S+)(?:\s+(\S.*))?", re.DOTALL)


@dataclass(frozen=True)
class Stage:
    """Passes, and the steps behind them; `learning_rate` is the peak, None for that of the run."""

    steps: int
    passes: tuple[GraphPass, ...] = ()
    learning_rate: float | None = None
    each: str | None = None

    @property
    def text(self) -> str:
        """What is done, as the text of its passes."""
        return ",".join(map(str, self.passes))

    @property
    def blends(self) -> tuple[BlendActivation, ...]:
        """The passes whose activations go over in the course of this stage."""
        return tuple(one for one in self.passes if isinstance(one, BlendActivation) and not one.end)


def parse_stages(text: str) -> tuple[Stage, ...]:
    """Stages of a text, or of the file that it names (`.json`, else the same text with comments behind `#`).

    Raises:
        InputError: something that is no stage, naming it.
    """
    path = Path(text.strip()).expanduser() if len(text) < 4096 and ":" not in text else None
    if path is not None and not path.is_file():
        raise InputError(
            f"--stages: {text.strip()!r} is neither a file nor stages such as '100: each strip-layer-norm'"
        )
    content = text if path is None else _content(path)
    if path is not None and path.suffix == ".json":
        found = tuple(map(_from_json, _json_list(content, path)))
    else:
        lines = [line.partition("#")[0] for line in content.splitlines()]
        found = tuple(_from_text(part) for line in lines for part in split_terms(line, ";") if part)
    if not found:
        raise InputError("--stages names no stage")
    return found


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--stages {path} cannot be read as UTF-8 text: {first_line(error)}") from error


def _json_list(content: str, path: Path) -> list[Any]:
    try:
        items = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"--stages {path} is no JSON: {error}") from error
    if not isinstance(items, list):
        raise InputError(f"--stages {path} holds no list of stages")
    return items


def _from_json(item: Any) -> Stage:
    known: dict[str, Any] = {"steps": int, "passes": str, "learning_rate": (int, float, NoneType)}
    known["each"] = (str, NoneType)
    if not isinstance(item, dict) or not set(item) <= set(known) or "steps" not in item:
        raise InputError(f"--stages: {item!r} is no stage: its entries are {', '.join(known)}")
    for name, value in item.items():
        if not isinstance(value, known[name]) or isinstance(value, bool):
            raise InputError(f"--stages: {item!r}: {name} cannot be {value!r}")
    return _stage(item, str(item["steps"]), item.get("learning_rate"), item.get("passes", ""), item.get("each"))


def _from_text(text: str) -> Stage:
    match = _STAGE.fullmatch(text.strip())
    if match is None:
        raise InputError(f"--stages: {text!r} is not STEPS: PASSES or STEPS@LEARNING_RATE: PASSES")
    each = _EACH.fullmatch(match[3].strip())
    passes, parts = (each[1], each[2] or "") if each else (match[3].strip(), None)
    return _stage(text, match[1], match[2], passes, parts)


def _stage(where: Any, steps: str, rate: Any, passes: str, each: str | None) -> Stage:
    try:
        count, number = int(steps), None if rate is None else float(rate)
    except (TypeError, ValueError):
        raise InputError(f"--stages: {where!r} has a number that is none") from None
    if count < 1 or (number is not None and not 0 <= number < 1):
        raise InputError(f"--stages: {where!r} needs at least one step and a learning rate in [0, 1)")
    found = tuple(parse_pass(part) for part in split_terms(passes, ",") if part)
    if each is not None and not (len(found) == 1 and isinstance(found[0], NormPass)):
        raise InputError(f"--stages: {where!r}: `each` takes one pass over norms, such as freeze-layer-norm")
    return Stage(count, found, number, each)


def expand(stages: Sequence[Stage], model: TransformedModel) -> tuple[Stage, ...]:
    """Stages with `each` as one stage for each norm of `model`, in the order of their parts.

    Raises:
        InputError: `each` for norms that the model does not have.
    """
    found: list[Stage] = []
    for stage in stages:
        if stage.each is None:
            found.append(stage)
            continue
        (one,) = stage.passes
        order = {"order": stage.each} if stage.each else {}
        single = [parse_pass(text) for text in removal_schedule(model, pass_name=one.name, **order)]
        if not single:
            raise InputError(f"--stages: {model.convention.family} has no norm for `each {one} {stage.each}`")
        for step in single:
            assert isinstance(step, NormPass)
            assert isinstance(one, NormPass)
            chosen = dataclasses.replace(one, layers=step.layers, norms=step.norms)
            found.append(dataclasses.replace(stage, passes=(chosen,), each=None))
    return tuple(found)


class StagedRemoval:
    """The stages of a run over one model, which passes change in place."""

    def __init__(self, stages: Sequence[Stage], calibration: Sequence[Tensor]) -> None:
        self.stages = tuple(stages)
        self.calibration = tuple(calibration)
        self.starts = [0, *itertools.accumulate(stage.steps for stage in self.stages)]

    @property
    def steps(self) -> int:
        """Steps of all stages together."""
        return self.starts[-1]

    def described(self) -> list[dict[str, Any]]:
        """The stages as data: the step that each begins at, its steps, passes and learning rate."""
        return [
            {"start": start, "steps": one.steps, "passes": one.text, "learning_rate": one.learning_rate}
            for start, one in zip(self.starts[:-1], self.stages, strict=True)
        ]

    def number(self, step: int) -> int:
        """The stage that the step after `step` steps belongs to; the last one behind all of them."""
        return min(bisect_right(self.starts, step), len(self.stages)) - 1

    def begins(self, step: int) -> bool:
        """Whether a stage begins after `step` steps."""
        return step in self.starts[:-1]

    def rate(self, step: int, peak: float) -> float:
        """Factor of the run's learning rate at a step, `peak` being that of the run."""
        own = self.stages[self.number(step)].learning_rate
        return 1.0 if own is None or peak == 0 else own / peak

    def enter(self, model: TransformedModel, number: int) -> None:
        """Apply what stage `number` begins with, behind the end of what the one before it blended."""
        self._end_blends(model, number - 1)
        run_passes(model, self.stages[number].passes, self.calibration)

    def _end_blends(self, model: TransformedModel, number: int) -> None:
        blended = self.stages[number].blends if number >= 0 else ()
        run_passes(model, tuple(dataclasses.replace(one, end=True) for one in blended), None)

    def replay(self, model: TransformedModel, step: int) -> None:
        """Bring a model from the start of the run to the graph it had when a checkpoint was written at `step`."""
        for number in range(self.number(step - 1) + 1 if step else 0):
            self.enter(model, number)

    def blend(self, model: TransformedModel, step: int) -> None:
        """Set the share of blended activations for the step after `step` steps: 0 in the last step of their stage."""
        number = self.number(step)
        stage = self.stages[number]
        if stage.blends:
            share = 1.0 - (step - self.starts[number] + 1) / stage.steps
            for name, buffer in model.named_buffers():
                if name.startswith("blend_activation."):
                    buffer.fill_(max(share, 0.0))

    def finish(self, model: TransformedModel) -> None:
        """End what the last stage blended."""
        self._end_blends(model, len(self.stages) - 1)


def check_stages(text: str) -> None:
    """Raise InputError for stages that cannot be read, or with passes that are unknown."""
    try:
        parse_stages(text)
    except RecipeError as error:
        raise InputError(f"--stages: {error}") from error
