"""Schedules of a training run: norms removed one at a time, passes applied in stages, heads that become static.

A removal has stages: passes that are applied in the course of a run, each with steps of its own to recover in. A stage
is written `STEPS: PASSES`, or `STEPS@LEARNING_RATE: PASSES`; stages are divided by `;` or stand in lines:

    100:                                     train the model as it is
    20: each freeze-layer-norm ffn           the norms before FFNs, one at a time, 20 steps each
    20: each freeze-layer-norm qk,v,final    then other norms, in this order
    200: blend-activation                    activations blended out over 200 steps, 1 to 0
    100@1e-4: softmax-temperature            a temperature comes in, at another learning rate

`each PASS PARTS` is `removal_schedule`: a stage for each norm. Blended activations are gone when their stage ends. In a
JSON file a stage is an object of `steps`, `passes` and, if wanted, `learning_rate` and `each` (names of parts).

Heads become static in the course of a run if their entropy stays near its largest value. After each evaluation the
entropy of every head, averaged over held-out texts and positions, is divided by the largest that causal attention can
have, Σ log i / T over the positions i = 1 … T. A head is ripe once that share was at least `entropy` in `patience`
evaluations in a row. The ripe heads of highest entropy become uniform averages before the next step
(`static-attention`), so many that at most `most` of all heads have been switched, a number that grows linearly
from 0 to `most` over the share `until` of the run. Every checkpoint records which heads were switched, and how long
others have been near.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from torch import Tensor, nn

from aero_compile.analysis.norm_sites import find_norm_sites, parse_norms
from aero_compile.analysis.selections import Head, heads_text, listed_heads
from aero_compile.errors import InputError, OutputDirError, RecipeError, first_line
from aero_compile.files import write_atomically
from aero_compile.graph_pass import GraphPass
from aero_compile.model import TransformedModel
from aero_compile.passes.blend_activation import BlendActivation
from aero_compile.passes.lib.head_edits import heads_with_softmax
from aero_compile.passes.lib.norms import NormPass
from aero_compile.passes.static_attention import StaticAttention
from aero_compile.pipeline import run_passes, transform
from aero_compile.recipe.labels import split_terms
from aero_compile.recipe.recipe import parse_pass
from aero_compile.training.data.sources import cause_line


def removal_schedule(
    model: nn.Module,
    order: str = "ffn,qk,v,query,key,post-attention,post-ffn,other,final",
    pass_name: str = "strip-layer-norm",
) -> tuple[str, ...]:
    """Passes, as text, that take the norms of `model` one site at a time; each is valid after those before it.

    The default order is that of Heimersheim 2024 and Baroni et al. 2025 (`ln_2`, `ln_1` for queries and keys, `ln_1`
    for values, `ln_f`), with norms that GPT-2 does not have before the final one.

    Args:
        model: a TransformedModel, or any model that `transform` takes.
        order: names of parts, divided by commas; `attention` is one step a layer. Norms that are not named stay.
        pass_name: `strip-layer-norm`, `freeze-layer-norm` or `layer-norm-to-dyt`.

    Raises:
        RecipeError: an unknown name.
    """
    sites = find_norm_sites(model if isinstance(model, TransformedModel) else transform(model, "baseline"))
    steps: list[str] = []
    for name in order.replace(" ", "").split(","):
        parts = parse_norms(name)
        if "final" not in parts or len(parts) > 1:
            layers = sorted({s.norm.layer for s in sites if s.part in parts and s.norm.layer is not None})
            steps += [f"{pass_name}{{layers={layer},norms={name}}}" for layer in layers]
        if "final" in parts and any(site.part == "final" for site in sites):
            steps.append(f"{pass_name}{{norms=final}}")
    return tuple(dict.fromkeys(steps))


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


SWITCHED_FILE = "switched_heads.json"


@dataclass(frozen=True)
class SwitchRule:
    """When heads become static.

    `most`: share of all heads that may. `entropy`: share of the largest entropy. `patience`: evaluations in a row.
    `until`: share of the run over which the number of heads that may have been switched grows.
    """

    most: float
    entropy: float = 0.9
    patience: int = 2
    until: float = 0.5

    def allowed(self, heads: int, progress: float) -> int:
        """How many of `heads` may have been switched after the share `progress` of the run."""
        return math.floor(self.most * heads * min(1.0, progress / self.until) + 1e-9)


def largest_entropy(length: int) -> float:
    """Mean over causal rows of 1 … `length` keys of the largest entropy each can have, in nats."""
    return math.lgamma(length + 1) / length


@dataclass
class HeadSwitching:
    """The heads of a run that are near the largest entropy, those to switch next, and those that were switched.

    `length`: tokens of the texts that entropies are measured on. `near`: evaluations in a row of the heads that are.
    `seen`: the step of the last evaluation.
    """

    rule: SwitchRule
    length: int
    near: dict[Head, int] = field(default_factory=dict)
    chosen: frozenset[Head] = frozenset()
    switched: list[frozenset[Head]] = field(default_factory=list)
    seen: int = -1

    def observe(self, step: int, progress: float, entropies: Sequence[Sequence[float]], left: Collection[Head]) -> None:
        """Take the entropies `[L][H]` in nats of an evaluation at `step`, the share `progress` of the run.

        `left`: the heads that still have a softmax. An evaluation at a step that was looked at already is passed over.
        """
        if step == self.seen:
            return
        self.seen = step
        largest = largest_entropy(self.length)
        shares = {head: entropies[head[0]][head[1]] / largest for head in sorted(left)}
        near = {head for head, share in shares.items() if share >= self.rule.entropy}
        self.near = {head: self.near.get(head, 0) + 1 for head in sorted(near)}
        ripe = [head for head, times in self.near.items() if times >= self.rule.patience]
        heads, gone = sum(map(len, entropies)), sum(map(len, self.switched))
        room = self.rule.allowed(heads, progress) - gone
        self.chosen = frozenset(sorted(ripe, key=lambda head: (-shares[head], head))[: max(0, room)])

    @property
    def text(self) -> str:
        """The pass that switches the heads that were chosen."""
        return str(_pass(self.chosen))

    def enter(self, model: TransformedModel) -> None:
        """Switch the heads that were chosen."""
        run_passes(model, (_pass(self.chosen),), None)
        self.switched.append(self.chosen)
        self.near = {head: times for head, times in self.near.items() if head not in self.chosen}
        self.chosen = frozenset()

    def replay(self, model: TransformedModel) -> None:
        """Bring a model from the start of the run to the graph it had when this was saved."""
        for heads in self.switched:
            run_passes(model, (_pass(heads),), None)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        content = {
            "near": {heads_text([head]): times for head, times in self.near.items()},
            "chosen": heads_text(self.chosen),
            "switched": [heads_text(heads) for heads in self.switched],
            "seen": self.seen,
        }
        write_atomically(path, json.dumps(content, indent=1) + "\n")

    def load(self, path: Path) -> None:
        """Read what `save` wrote.

        Raises:
            OutputDirError: a file that it did not write.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            self.near = {head: int(times) for text, times in content["near"].items() for head in listed_heads(text)}
            self.chosen = listed_heads(content["chosen"])
            self.switched = list(map(listed_heads, content["switched"]))
            self.seen = int(content["seen"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecipeError) as error:
            raise OutputDirError(
                f"{path} does not tell which heads were switched ({cause_line(error)}): resume from another checkpoint"
            ) from error


def check_heads(model: TransformedModel) -> None:
    """Raise AeroError where no head of `model`, which this changes, can become static by itself."""
    left = heads_with_softmax(model)
    if not left:
        raise InputError(f"--switch-static finds no head with a softmax in {model.convention.family}")
    run_passes(model, (_pass([min(left)]),), None)


def _pass(heads: Collection[Head]) -> StaticAttention:
    return StaticAttention(heads=heads_text(heads))
