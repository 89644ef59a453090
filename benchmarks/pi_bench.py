"""Measure what private inference costs: recipes × models × sequence lengths, each in two real processes.

Every row transforms the model, counts the nonlinear operations that remain, runs one private forward pass,
and compares its logits with those of float32 PyTorch. Weights of named shapes are random (seeded): they
change neither bytes nor messages. A perplexity is shown only where a trained model and held-out text are at
hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import aero_compile
from aero_compile.cookbook.recipe import recipe_names, resolve
from aero_compile.errors import AeroError, InputError, OutputDirError, nearest
from aero_compile.progress import Progress
from aero_compile.reporting.evaluate import private_row
from aero_compile.reporting.report import (
    Row,
    document,
    read_json,
    row_from_json,
    terminal_width,
    text_table,
    write_json,
)
from aero_compile.reporting.report_html import write_html

DEFAULT_RECIPES = "SM+LN+G,SM+LN+R,SM+R,softmax_only"
TINY: dict[str, Any] = {"vocab_size": 256, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}


def tiny(layers: int | None) -> nn.Module:
    """Return a GPT-2 block small enough that four recipes take minutes: d=64, 4 heads, 2 layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**{**TINY, "n_layer": layers or TINY["n_layer"]}))


def gpt2(layers: int | None) -> nn.Module:
    """Return GPT-2 small's shape: d=768, 12 heads, 12 layers, 50,257 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=layers or 12))


def pythia_70m(layers: int | None) -> nn.Module:
    """Return Pythia-70M's shape: d=512, 8 heads, 6 layers of attention beside FFN, 50,304 tokens."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    shape: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "vocab_size": 50304,
    }
    return GPTNeoXForCausalLM(GPTNeoXConfig(**shape, num_hidden_layers=layers or 6))


SHAPES: dict[str, Callable[[int | None], nn.Module]] = {"tiny": tiny, "gpt2": gpt2, "pythia-70m": pythia_70m}
ARTIFACT_RECIPE = "saved"
CALIBRATION_BATCH = 4
"""Random sequences on which recipes that freeze norms measure them, as random as the weights."""


@dataclass(frozen=True)
class Task:
    """One row to be measured; ``recipe`` is None for an artifact, which is run as it was saved."""

    model: str
    recipe: str | None
    seq_len: int


def positive(text: str) -> int:
    """Parse a whole number of at least 1 for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the command line's description."""
    p = argparse.ArgumentParser(prog="pi_bench.py", description=__doc__.split("\n\n")[0])
    p.add_argument(
        "--model",
        nargs="+",
        default=["tiny"],
        metavar="MODEL",
        help=f"shapes with random weights ({', '.join(SHAPES)}) or folders of saved artifacts; default: tiny",
    )
    p.add_argument(
        "--recipes",
        metavar="LIST",
        help=f"recipe names, labels or pass lists, divided by commas; default: {DEFAULT_RECIPES}. "
        "An artifact carries its own recipe.",
    )
    p.add_argument("--seq-len", nargs="+", type=positive, default=[32], metavar="T", help="tokens; default: 32")
    p.add_argument("--layers", type=positive, metavar="N", help="use N layers of the shape instead of all")
    p.add_argument("--protocol", choices=["cheetah", "semi2k"], default="cheetah", help="default: cheetah")
    p.add_argument("--seed", type=int, default=0, help="of weights and tokens; default: 0")
    p.add_argument("--cold-only", action="store_true", help="measure only the first pass, which pays the set-up")
    p.add_argument("--json", type=Path, metavar="FILE", help="write rows here, each as soon as it is measured")
    p.add_argument("--html", type=Path, metavar="FILE", help="write the report with its plots here")
    found = p.add_mutually_exclusive_group()
    found.add_argument("--resume", action="store_true", help="keep the rows that --json FILE has, do the others")
    found.add_argument("--overwrite", action="store_true", help="replace --json and --html files that exist")
    return p


def is_artifact(model: str) -> bool:
    """Tell whether a ``--model`` is a folder rather than the name of a shape; raises for neither."""
    if model in SHAPES:
        return False
    if Path(model).is_dir():
        return True
    hint = "" if "/" in model else nearest(model, SHAPES)
    raise InputError(f"--model {model!r} is neither a known shape nor the folder of a saved artifact{hint}")


def tasks(args: argparse.Namespace) -> list[Task]:
    """Return the rows to measure, in the table's order; raises before anything long has begun."""
    names = recipe_names(args.recipes or DEFAULT_RECIPES)
    found = []
    for model in args.model:
        if is_artifact(model):
            if args.recipes or args.layers:
                raise InputError(f"{model} is an artifact: it is run as saved, so leave --recipes and --layers out")
            found += [Task(model, None, t) for t in args.seq_len]
        else:
            found += [Task(model, name, t) for t in args.seq_len for name in names]
    return found


def start(args: argparse.Namespace, todo: list[Task]) -> tuple[list[Row], list[Task]]:
    """Return rows kept from an earlier run and the tasks left; refuses to overwrite what was not offered."""
    if args.resume and not args.json:
        raise InputError("--resume needs --json FILE, the file with the rows of the earlier run")
    for path in (args.json, args.html):
        if path is not None and path.is_dir():
            raise OutputDirError(f"{path} is a folder, not a file")
    rows: list[Row] = []
    if args.resume and args.json.exists():
        earlier = read_json(args.json)
        if earlier.get("seed") != args.seed or earlier.get("config") != config(args):
            raise InputError(f"{args.json} was made with another seed, --layers or --cold-only; not resumed")
        rows = [row_from_json(data) for data in earlier["rows"]]
    elif not args.overwrite:
        for path in (args.json, args.html):
            if path is not None and path.exists():
                hint = "--resume continues it, --overwrite replaces it" if args.json else "--overwrite replaces it"
                raise OutputDirError(f"{path} exists; {hint}")
    have = {(row.model, row.recipe, row.seq_len, row.protocol) for row in rows}
    left = [t for t in todo if (t.model, recipe_key(t), t.seq_len, args.protocol) not in have]
    return rows, left


def config(args: argparse.Namespace) -> dict[str, object]:
    """Return the settings that rows of one file share."""
    return {"layers": args.layers, "protocol": args.protocol, "cold_only": args.cold_only}


def recipe_key(task: Task) -> str:
    """Return what a row's ``recipe`` field will be: the recipe's name, or an artifact's own text."""
    return ARTIFACT_RECIPE if task.recipe is None else resolve(task.recipe).name


def build(task: Task, args: argparse.Namespace) -> tuple[aero_compile.TransformedModel, str, str]:
    """Return the model of a task ready to run, the recipe's name and its label for the table."""
    if task.recipe is None:
        model = aero_compile.load(task.model)
        return model, ARTIFACT_RECIPE, f"{Path(task.model).name}: {model.recipe or 'as captured'}"
    recipe = resolve(task.recipe)
    torch.manual_seed(args.seed)
    source: Any = SHAPES[task.model](args.layers).eval()
    tokens = torch.randint(0, source.config.vocab_size, (CALIBRATION_BATCH, task.seq_len))
    model = aero_compile.transform(source, recipe=recipe, calibration=tokens)
    return model, recipe.name, recipe.label or recipe.name


def check_lengths(todo: list[Task]) -> None:
    """Raise `InputError` for a sequence longer than its model's positions, before any row is measured."""
    limits: dict[str, int | None] = {}
    for task in todo:
        if task.model not in limits:
            limits[task.model] = (
                aero_compile.load(task.model).max_positions if task.recipe is None else positions(task.model)
            )
        limit = limits[task.model]
        if limit is not None and task.seq_len > limit:
            raise InputError(f"--seq-len {task.seq_len} is longer than the {limit} positions of {task.model}")


def positions(shape: str) -> int:
    """Return how many positions a named shape has; allocates nothing."""
    with torch.device("meta"):
        model: Any = SHAPES[shape](1)
    return int(model.config.max_position_embeddings)


def measure(task: Task, args: argparse.Namespace, progress: Progress) -> Row:
    """Measure one row."""
    name = f"{task.model} {task.recipe or ''} T={task.seq_len}".replace("  ", " ")
    with progress.step(f"{name}: two processes, {args.protocol}", live=False):
        model, recipe, label = build(task, args)
        generator = torch.Generator().manual_seed(args.seed)
        tokens = torch.randint(0, model.vocab_size, (1, task.seq_len), generator=generator)
        return private_row(
            model,
            tokens,
            recipe=recipe,
            label=label,
            model_name=task.model,
            protocol=args.protocol,
            warm=not args.cold_only,
        )


def run(args: argparse.Namespace) -> int:
    """Measure all rows, writing what was asked for after each one."""
    todo = tasks(args)
    rows, left = start(args, todo)
    check_lengths(left)
    progress = Progress(len(left))
    for task in left:
        rows.append(measure(task, args, progress))
        result = document(rows, title="Cost of private inference", seed=args.seed, config=config(args))
        if args.json:
            write_json(args.json, result)
        if args.html:
            write_html(args.html, rows, result)
    print(text_table(rows, terminal_width()))
    for path in (args.json, args.html):
        if path is not None:
            print(f"wrote {path}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 0, 2 for a mistake in the call, 130 when interrupted."""
    args = parser().parse_args(argv)
    try:
        return run(args)
    except AeroError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        kept = f"; {args.json} has the rows measured so far, --resume continues" if args.json else ""
        print(f"\ninterrupted{kept}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
