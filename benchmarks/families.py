"""Which families of decoders go through: capture, structure, census, recipes, training and entropies, each checked.

Every family is a tiny model (two layers of width 32, seeded random weights). The references are made without graphs:
the eager model is run under a watch that counts nonlinear operations, keeps attention probabilities, and can replace
norms and activations, which is what the recipes must compute before training.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import json
import os
import platform
import re
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script it would know its own folder alone

import torch
from torch import Tensor, nn

import aero_compile
from aero_compile import TransformedModel
from aero_compile.errors import AeroError, InputError, nearest
from aero_compile.exit_codes import exit_code
from aero_compile.files import write_atomically
from aero_compile.plain_help import HelpParser
from aero_compile.progress import Progress
from aero_compile.recipe.recipe import Recipe, resolve
from aero_compile.reporting.report import command_line
from aero_compile.training.run_directory import finite_or_none, versions
from benchmarks.lib import written_decoders, zoo
from benchmarks.lib.eager_watch import Watch, entropies, watch
from benchmarks.lib.written_decoders import POSITIONS
from benchmarks.lib.zoo import Entry, NotTried

ROOT = Path(__file__).resolve().parent.parent
FORMAT = "aero_compile.families/1"
BATCH, LENGTH = 2, 13
TOLERANCE = 1e-6
RECIPES = ("softmax_only", "SM+R")
WORKS, PARTLY, REFUSED, NOT_TRIED, FAILS = "works", "partly", "refused", "not tried", "fails"


@dataclasses.dataclass
class Row:
    """What was found for one entry; None where the stage before it failed.

    `layers`, `heads` and `ffn` are (found, by the config). `census` is the graph's, `counted` the eager model's.
    `parity` and `recipes` hold the largest difference of logits from the eager reference in float64. `training` is
    the mean loss of the first and of the last five steps, by recipe. `problems` are the checks that did not hold.
    """

    family: str
    variant: str
    status: str = FAILS
    layers: tuple[int, int | None] | None = None
    heads: tuple[list[int], int | None] | None = None
    ffn: tuple[list[int], int | None] | None = None
    census: str | None = None
    counted: str | None = None
    parity: float | None = None
    recipes: dict[str, float] = dataclasses.field(default_factory=dict)
    remains: dict[str, str] = dataclasses.field(default_factory=dict)
    training: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    entropies: float | None = None
    problems: list[str] = dataclasses.field(default_factory=list)
    note: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.family}:{self.variant}" if self.variant else self.family


class TooSlow(BaseException):
    """An entry that did not end in time; no exception that a model's own code could catch."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `TooSlow` inside when the time is over."""

    def ring(*_: Any) -> None:
        raise TooSlow(f"not finished after {seconds} s")

    old = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def check(entry: Entry, *, steps: int = 50, seconds: int = 600) -> Row:
    """Run every check on one entry; never raises for what the model or the library does."""
    row = Row(entry.family, entry.variant)
    begin = time.monotonic()
    try:
        with time_limit(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _check(entry, row, steps)
        row.status = PARTLY if row.problems else WORKS
    except NotTried as error:
        row.status, row.note = NOT_TRIED, str(error)
    except AeroError as error:
        row.status, row.note = REFUSED, str(error)
    except TooSlow as error:
        row.status, row.note = NOT_TRIED, str(error)
    except Exception as error:
        text = " ".join(str(error).split())
        row.note = f"{type(error).__name__}: {text[:200]}"
    row.seconds = round(time.monotonic() - begin, 1)
    return row


def _check(entry: Entry, row: Row, steps: int) -> None:
    source = entry.build()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, written_decoders.VOCAB, (BATCH, LENGTH), generator=generator)
    tolerance = TOLERANCE
    if problem := _cannot_run(source, ids):
        source, tolerance = source.float(), 1e-3
        row.note = f"checked in float32 ({problem})"
        if problem := _cannot_run(source, ids):
            try:
                aero_compile.transform(source, "baseline")
            except AeroError as error:
                if "could not be run" not in str(error):
                    raise
            raise NotTried(f"its own code fails at these sizes: {problem}")
    model = aero_compile.transform(source, "baseline")
    reference, seen = _eager(source, ids)
    _structure(entry, row, source, model, seen)
    _census(row, model, seen)
    if not entry.visible:
        row.counted, row.note = None, "activations written as arithmetic, which cannot be counted while it runs"
        row.problems = [problem for problem in row.problems if not problem.startswith("census")]
    row.parity = _difference(model(ids, labels=ids).logits, reference)
    _require(row, row.parity < tolerance, f"logits differ by {row.parity:.1e}")
    _entropies(row, model, ids, seen, tolerance)
    for name in RECIPES:
        _recipe(row, name, source, model, ids, steps, tolerance)


def _cannot_run(source: nn.Module, ids: Tensor) -> str:
    """Why the eager model cannot be run on tokens; empty if it can."""
    try:
        with torch.no_grad():
            _call(source, ids)
    except Exception as error:
        known = "overflow" in str(error)  # `_eager` helps
        return "" if known else f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    return ""


def _require(row: Row, holds: bool, problem: str) -> None:
    if not holds:
        row.problems.append(problem)


def _eager(source: nn.Module, ids: Tensor, edit: str = "") -> tuple[Tensor, Watch]:
    """Logits `[B, T, V]` of the eager model in float64, and what was seen."""

    def run() -> Tensor:
        return _call(source, ids)

    shape = ids.shape[0], ids.shape[1]
    try:
        return watch(source, run, *shape, edit=edit)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
    torch.set_default_dtype(torch.float64)  # its own constants are too large for float32
    try:
        return watch(source, run, *shape, edit=edit)
    finally:
        torch.set_default_dtype(torch.float32)


def _call(source: nn.Module, ids: Tensor) -> Tensor:
    """Logits `[B, T, V]` of the eager model."""
    names = inspect.signature(source.forward).parameters
    if not hasattr(source, "config") and "targets" in names:
        out = source(ids, ids)  # else only the last position
    else:
        mask = {"attention_mask": torch.ones_like(ids)} if "attention_mask" in names else {}
        out = source(ids, **mask)
    found = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    logits: Tensor = found if found is not None else out[0]
    return logits.reshape(*ids.shape, -1)


def _difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative where the logits are larger than 1."""
    return float(((found - expected).abs() / expected.abs().clamp_min(1)).max())


def _structure(entry: Entry, row: Row, source: nn.Module, model: TransformedModel, seen: Watch) -> None:
    layers, heads, width = entry.expected(source)
    counted = seen.counts["softmax", LENGTH]
    if heads and layers == model.num_layers and counted == sum(model.num_heads) != layers * heads:
        row.note = f"its attentions have {counted} softmaxes, its config speaks of {layers}×{heads}"
        heads = None
    structure = model.structure
    widths = sorted({int(structure.values[ffn.output.all_input_nodes[0]].shape[-1]) for ffn in structure.ffns})
    row.layers, row.heads = (model.num_layers, layers), (sorted(set(model.num_heads)), heads)
    row.ffn = (widths, width)
    _require(row, layers in (None, model.num_layers), f"{model.num_layers} layers found, {layers} by the config")
    _require(row, heads is None or row.heads[0] == [heads], f"{row.heads[0]} heads found, {heads} by the config")
    ffns = Counter(ffn.layer for ffn in structure.ffns)
    _require(row, all(ffns[i] for i in range(model.num_layers)), f"{len(structure.ffns)} FFNs in all layers")
    _require(row, width is None or widths == [width], f"FFN width {widths} found, {width} by the config")


def _census(row: Row, model: TransformedModel, seen: Watch) -> None:
    census = aero_compile.census(model, LENGTH)
    row.census = str(census)
    found: Counter[tuple[str, int]] = Counter()
    for op in census.ops:
        found[op.kind, op.shape[-1]] += op.count
    expected = +seen.counts
    row.counted = ", ".join(f"{kind} {count}×{width}" for (kind, width), count in sorted(expected.items()))
    if not expected:
        row.counted = None  # written without functions that could be seen
    elif found != expected:
        more = ", ".join(f"{c}×{k} {w}" for (k, w), c in sorted((found - expected).items()))
        less = ", ".join(f"{c}×{k} {w}" for (k, w), c in sorted((expected - found).items()))
        row.problems.append(f"census has {more or 'nothing'} instead of {less or 'nothing'}")


def _entropies(row: Row, model: TransformedModel, ids: Tensor, seen: Watch, tolerance: float) -> None:
    found = model(ids, output_entropies=True).entropies
    shapes = [tuple(e.shape) for e in found]
    expected = [(BATCH, heads, LENGTH) for heads in model.num_heads]
    _require(row, shapes == expected, f"entropies have shapes {shapes}")
    references = _by_layer([entropies(p) for p in seen.probabilities], model.num_heads)
    if references and shapes == expected:
        row.entropies = max(float((a - b).abs().max()) for a, b in zip(found, references, strict=True))
        _require(row, row.entropies < tolerance, f"entropies differ by {row.entropies:.1e}")


def _by_layer(parts: list[Tensor], heads: Sequence[int]) -> list[Tensor]:
    """Entropies `[B, H, T]` of each layer, from those of each softmax."""
    rows = [head for part in parts for head in part.unbind(1)]
    starts = [sum(heads[:i]) for i in range(len(heads))]
    fits = len(rows) == sum(heads)
    return [torch.stack(rows[i : i + n], 1) for i, n in zip(starts, heads, strict=True)] if fits else []


def _chosen(name: str, model: TransformedModel) -> Recipe:
    recipe = resolve(name)
    if model.max_positions is None:
        recipe = recipe.with_option("softmax-temperature", max_positions=POSITIONS)
    return recipe


def _recipe(
    row: Row, name: str, source: nn.Module, baseline: TransformedModel, ids: Tensor, steps: int, tolerance: float
) -> None:
    """Apply a recipe; its census must be the promised one, its function that of the edited eager model."""
    recipe = _chosen(name, baseline)
    if baseline.max_positions is None and "softmax-temperature" in recipe.text:
        row.note = "; ".join(filter(None, [row.note, "no limit of positions: T_max is given"]))
    try:
        model = aero_compile.transform(baseline, recipe)
    except AeroError as error:
        row.problems.append(f"{name}: {error}")
        return
    census, before = aero_compile.census(model, LENGTH), aero_compile.census(baseline, LENGTH)
    row.remains[name] = str(census)
    promised = {"softmax"} | ({"relu"} if "R" in recipe.remains else set())
    extra = sorted(set(census.kinds) - promised)
    unexpected = [kind for kind in extra if kind not in before.kinds]
    _require(row, not unexpected, f"{name} adds {', '.join(unexpected)}")
    _require(row, census.total("softmax") == before.total("softmax"), f"{name} changes the number of softmaxes")
    if extra:
        note = f"keeps {', '.join(extra)}"
        row.note = "; ".join(dict.fromkeys(filter(None, [*row.note.split("; "), note])))
    _require(row, not {"layernorm", "gelu", "silu"} & set(extra), f"{name} leaves {', '.join(extra)}")
    if row.counted is not None:
        expected, _ = _eager(source, ids, edit="relu" if "relu" in promised else "linear")
        row.recipes[name] = _difference(model(ids, labels=ids).logits, expected)
        _require(row, row.recipes[name] < tolerance, f"{name}: logits differ by {row.recipes[name]:.1e}")
    row.training[name] = first, last = train(model, steps)
    _require(row, last < 0.9 * first, f"{name}: {steps} steps take the loss from {first:.2f} to {last:.2f}")


def train(model: TransformedModel, steps: int) -> tuple[float, float]:
    """Train a copy in float32 on sequences that follow a rule; mean loss of the first and the last five steps."""
    model = copy.deepcopy(model).float().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(2)
    torch.manual_seed(2)  # of dropout
    losses = []
    for _ in range(steps):
        tokens = [torch.randint(3, written_decoders.VOCAB, (8,), generator=generator)]
        for _ in range(15):
            tokens.append(3 + (tokens[-1] * 5 + 7) % (written_decoders.VOCAB - 3))
        ids = torch.stack(tokens, 1)
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss))
    few = max(1, min(5, steps // 2))
    return sum(losses[:few]) / few, sum(losses[-few:]) / few


# -- the table ---------------------------------------------------------------------------------------------------

HEAD = ["family", "status", "layers", "heads", "FFN", "census", "eager count", "parity", *RECIPES, "trains"]
HEAD += ["entropies", "note"]


def cells(row: Row) -> list[str]:
    """The line of a row; – where there is nothing to show."""

    def pair(value: Any) -> str:
        if value is None:
            return "–"
        found = "/".join(map(str, value[0])) if isinstance(value[0], list) else str(value[0])
        return found or "0"

    def error(value: float | None) -> str:
        return "–" if value is None else f"{value:.0e}"

    agrees = "–"
    if row.counted is not None:
        agrees = "differs" if any(p.startswith("census") for p in row.problems) else "same"
    trains = [f"{number(first, '.1f')}→{number(last, '.1f')}" for first, last in row.training.values()]
    notes = [*row.problems, *([row.note] if row.note else [])]
    return [
        *(row.name, row.status, pair(row.layers), pair(row.heads), pair(row.ffn), row.census or "–", agrees),
        *(error(row.parity), *(_applied(row, name) for name in RECIPES), ", ".join(trains) or "–"),
        *(error(row.entropies), "; ".join(notes)),
    ]


def _applied(row: Row, name: str) -> str:
    if name not in row.remains:
        return "–"
    return number(row.recipes[name], ".0e") if name in row.recipes else "applied"


def number(value: float | None, form: str) -> str:
    """A figure of a row; JSON has none for what is not finite."""
    return "nan" if value is None else format(value, form)


def summary(rows: Sequence[Row]) -> str:
    """How many entries there are of each status, in one line."""
    counts = Counter(row.status for row in rows)
    return ", ".join(f"{counts[status]} {status}" for status in (WORKS, PARTLY, REFUSED, NOT_TRIED, FAILS))


def text_table(rows: Sequence[Row]) -> str:
    """The table for a terminal, without the long columns."""
    kept = [i for i, name in enumerate(HEAD) if name not in ("census", "note")]
    lines = [[HEAD[i] for i in kept], *([cells(row)[i] for i in kept] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(kept))]
    text = ["  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    notes = [f"  {row.name}: {cells(row)[-1]}" for row in rows if cells(row)[-1]]
    return "\n".join([*text, "", *notes, "", summary(rows)])


def markdown(rows: Sequence[Row], document: dict[str, Any]) -> str:
    """The page for the documentation."""

    def table(head: list[str], lines: list[list[str]]) -> list[str]:
        escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
        return ["| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *escaped]]

    done = [row for row in rows if row.status in (WORKS, PARTLY)]
    others = [row for row in rows if row.status not in (WORKS, PARTLY)]
    found = document["versions"]
    return "\n".join(
        [
            "# Families",
            "",
            f"Made by `{document['command']}` with torch {found['torch']}, transformers {found.get('transformers')}: "
            f"{summary(rows)}.",
            "",
            "Every family is a tiny model with two layers and seeded random weights in float64. *Eager count*: the "
            "census agrees with a count of torch functions and modules made while the eager model ran. *Parity*, "
            f"*{RECIPES[0]}* and *{RECIPES[1]}*: largest difference of logits from the eager model, with its norms and "
            "activations replaced for the recipes (relative above 1). *Trains*: loss of the first and last five of "
            f"{document['config']['steps']} steps, with each of the two recipes. *Entropies*: largest difference, in "
            "nats, from those of the eager model's attention. `–`: not available.",
            "",
            *table(HEAD, [cells(row) for row in done]),
            "",
            "## What does not go through, and why",
            "",
            *table(["family", "status", "reason"], [[r.name, r.status, cells(r)[-1]] for r in others]),
            "",
        ]
    )


# -- command line ------------------------------------------------------------------------------------------------


def entries(only: Sequence[str] | None, named: bool) -> list[Entry]:
    """The entries to check: all, those of the named families, or those whose family or name is given."""
    known = [*zoo.plain_entries(), *zoo.foreign_entries(), *zoo.hugging_face_entries()]
    if only:
        names = {entry.family for entry in known} | {entry.name for entry in known}
        for name in only:
            if name not in names:
                raise InputError(f"unknown family {name!r}{nearest(name, names)}")
        return [entry for entry in known if entry.family in only or entry.name in only]
    first = {e.family for e in [*zoo.plain_entries(), *zoo.foreign_entries()]} | set(zoo.NAMED)
    return [entry for entry in known if not named or entry.family in first]


def parser() -> argparse.ArgumentParser:
    """Return the command line's description."""
    p = HelpParser(prog="families.py", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--only", nargs="+", metavar="FAMILY", help="these families (gpt2) or variants (gpt2:eager)")
    p.add_argument("--named", action="store_true", help="leave out families of transformers that few people use")
    p.add_argument("--list", action="store_true", help="print the names of all entries and stop")
    p.add_argument("--steps", type=int, default=50, help="training steps; default: 50")
    p.add_argument("--seconds", type=int, default=600, help="give an entry up after so long; default: 600")
    p.add_argument("--json", type=Path, metavar="FILE", help="write rows here, each as soon as it is there")
    p.add_argument("--markdown", type=Path, metavar="FILE", help="write the page for the documentation here")
    p.add_argument("--resume", action="store_true", help="keep the rows that --json FILE has, do the others")
    p.add_argument("--again", action="store_true", help="with --resume: do the entries of --only anew, keep all others")
    return p


def read_rows(path: Path, config: dict[str, Any]) -> list[Row]:
    """Rows of an earlier run with the same settings."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] == FORMAT and document["config"] == config:
            return [Row(**data) for data in document["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"cannot read results from {path}: {error}") from error
    raise InputError(f"{path} was made with other settings or another version; not resumed")


def run(args: argparse.Namespace) -> int:
    """Check all entries, writing what was asked for after each one; returns 1 if one fails by a bug."""
    chosen = entries(args.only, args.named)
    if args.list:
        print("\n".join(entry.name for entry in chosen))
        return 0
    if args.steps < 2:
        raise InputError(f"--steps must be at least 2, got {args.steps}")
    if args.resume and not args.json:
        raise InputError("--resume needs --json FILE, the file with the rows of the earlier run")
    config = {"steps": args.steps, "batch": BATCH, "length": LENGTH, "tolerance": TOLERANCE}
    rows = read_rows(args.json, config) if args.resume and args.json.exists() else []
    if args.again:
        anew = {entry.name for entry in chosen}
        rows = [row for row in rows if row.name not in anew]
    have = {row.name for row in rows}
    left = [entry for entry in chosen if entry.name not in have]
    progress = Progress(len(left))
    for entry in left:
        with progress.step(entry.name):
            rows.append(check(entry, steps=args.steps, seconds=args.seconds))
        progress.say(f"    {rows[-1].status}{': ' + cells(rows[-1])[-1] if cells(rows[-1])[-1] else ''}")
        write(args, in_order(rows), config)
    rows = in_order(rows)
    write(args, rows, config)
    print(text_table(rows))
    return 1 if any(row.status == FAILS for row in rows) else 0


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The rows in the order of all entries, whatever they were made in."""
    place = {entry.name: number for number, entry in enumerate(entries(None, False))}
    return sorted(rows, key=lambda row: place[row.name])


def _anywhere(text: str) -> str:
    """A reason with the files of the user's code named as they are on any machine."""
    return re.sub(r"\S*/site-packages/", "", text.replace(f"{ROOT}/", ""))


def write(args: argparse.Namespace, rows: Sequence[Row], config: dict[str, Any]) -> None:
    """Write the files that were asked for."""
    for row in rows:
        row.note, row.problems = _anywhere(row.note), [_anywhere(problem) for problem in row.problems]
    document = {
        "format": FORMAT,
        "command": command_line().replace(f"{ROOT}/", ""),
        "seed": 0,
        "config": config,
        "versions": {**versions(), "platform": platform.platform()},
        "summary": summary(rows),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    if args.json:
        text = json.dumps(finite_or_none(document), indent=1, ensure_ascii=False, allow_nan=False)
        write_atomically(args.json, text + "\n")
    if args.markdown:
        write_atomically(args.markdown, markdown(rows, document))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line: 0, 1 if a family fails by a bug, 2 for a mistake in the call, 130 when interrupted."""
    args = parser().parse_args(argv)
    torch.set_num_threads(1)
    return exit_code(lambda: run(args), f"{args.json} has the rows so far, --resume continues" if args.json else "")


if __name__ == "__main__":
    sys.exit(main())
