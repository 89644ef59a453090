"""Train models for equally many steps and write perplexity against the bytes of a private forward, with the front.

Every model is trained in two parts with a schedule of the learning rate each: as its recipe from new weights for
--first-share of the steps, and, behind a change or none, for the others. So a model that is changed after training, by
passes (--changes) or by a search for a budget (--budgets), has seen as many tokens as one that was never changed. What
is changed alike shares the first part, which is a study of its own (see study.py). Seed after seed; each point is kept
when it is made, and the same command goes on behind the last one.

All flags behind `--` are those of `aero-compile retrain`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script it would know its own folder alone
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

from aero_compile.commands.options import names, positive
from aero_compile.errors import InputError, OutputDirError, nearest
from aero_compile.exit_codes import exit_code
from aero_compile.plain_help import HelpParser
from aero_compile.search.choices import CHOICES
from aero_compile.search.run import ORDERS
from aero_compile.training.command_line import parse_command_line
from benchmarks.lib import pareto_table
from benchmarks.lib.pareto_plan import ParetoPlan, make_models, rivals
from benchmarks.lib.pareto_points import Pricing, check_budgets
from benchmarks.lib.pareto_run import Pareto
from benchmarks.lib.study_plan import Plan, parse_axes, without_flag
from benchmarks.lib.study_run import human

RECIPES = ("SM+LN+G", "SM+LN+R", "SM+G", "SM+R", "SM+ScFFN", "EReg(SM(t)+ScFFN)")
CHANGES = ("static-attention{heads=entropy:8}", "static-attention{heads=entropy:12}")


def parser() -> argparse.ArgumentParser:
    """Return the command line's description."""
    p = HelpParser(
        prog="pareto.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] [-- flags of aero-compile retrain, --max-steps among them]",
        epilog="example: python benchmarks/pareto.py --hours 1 --seeds 3 --recipes SM+LN+G SM+R --change-of SM+R \\\n"
        "  --search-of SM+LN+G SM+R --budgets 75%% 50%% -- --max-steps 2000 --context 64",
    )
    text = f"labels, names or lists of passes that are trained as they are; default: {' '.join(RECIPES)} and the rivals"
    p.add_argument("--recipes", nargs="*", metavar="A", help=text)
    p.add_argument("--no-rivals", action="store_true", help="leave the rivals (docs/other_nonlinearities.md) out")
    text = "recipes that are changed by each of --changes behind the first part"
    p.add_argument("--change-of", nargs="*", default=[], metavar="A", help=text)
    text = f"lists of passes; default: {' '.join(CHANGES)}"
    p.add_argument("--changes", nargs="+", default=list(CHANGES), metavar="PASSES", help=text)
    text = "recipes for which each of --budgets is searched behind the first part"
    p.add_argument("--search-of", nargs="*", default=[], metavar="A", help=text)
    text = "amounts ('40 MB') or shares of what the recipe costs (60%%); default: 75%% 50%%"
    p.add_argument("--budgets", nargs="+", default=["75%", "50%"], metavar="B", help=text)
    p.add_argument("--orders", nargs="+", default=["greedy"], metavar="O", help=f"of searches: {', '.join(ORDERS)}")
    text = "kinds of choices of searches, divided by commas (default: heads)"
    p.add_argument("--choices", type=names, default=["heads"], metavar="LIST", help=text)
    p.add_argument("--blocks", type=positive, default=64, metavar="N", help="of text that a search reads; default: 64")
    p.add_argument("--seeds", type=positive, default=3, metavar="N", help="seeds 0 to N-1; default: 3")
    p.add_argument("--first-share", type=float, default=0.75, metavar="X", help="of the steps; default: 0.75")
    text = "what is tried for each recipe before its first part, a quarter of its steps each; may be repeated"
    p.add_argument("--tune", action="append", default=[], metavar="NAME=V,V", help=text)
    p.add_argument("--logits", choices=["last", "all"], default="last", help="that are priced; default: last")
    p.add_argument("--network", default="loopback", metavar="NET", help="of the parties: wan, lan or MBPS:RTT_MS")
    p.add_argument("--hours", type=float, default=1.0, metavar="H", help="budget of this call; default: 1")
    p.add_argument("--output-dir", type=Path, default=Path("runs/pareto"), help="default: runs/pareto")
    p.add_argument("--dry-run", action="store_true", help="list the models and what of them is done")
    return p


def make_plan(args: argparse.Namespace, base: Sequence[str]) -> ParetoPlan:
    """The plan that the command line asks for; raises InputError for one that cannot be carried out."""
    if not (math.isfinite(args.hours) and args.hours > 0):
        raise InputError(f"--hours must be a positive number, not {args.hours}")
    _known(args.orders, ORDERS, "order")
    _known(args.choices, CHOICES, "kind of choice")
    check_budgets(args.budgets)
    own = ("--recipe", "--seed", "--output-dir", "--resume", "--preset", "--stages", "--search-budget", "--distill")
    taken = [flag for flag in base if flag.replace("_", "-").partition("=")[0] in own]
    if taken:
        raise InputError(f"{', '.join(taken)} behind -- is set by the study itself, or differs between its two parts")
    steps = parse_command_line([*base, "--output-dir", "unused"])[1].max_steps
    first = round(args.first_share * steps)
    if steps < 2 or not 1 <= first < steps:
        raise InputError(
            f"--max-steps {steps} behind -- and --first-share {args.first_share} must leave steps to both parts"
        )
    recipes = list(RECIPES) if args.recipes is None else args.recipes
    recipes += [] if args.no_rivals else [label for label in rivals() if label not in recipes]
    models = make_models(
        recipes,
        dict.fromkeys(args.change_of, tuple(args.changes)),
        dict.fromkeys(args.search_of, tuple(args.budgets)),
        args.orders,
    )
    labels = tuple(dict.fromkeys(model.label for model in models))
    if not labels:
        raise InputError("there is no model to train: name some by --recipes")
    tune = parse_axes(args.tune, "--tune")
    kept = without_flag(base, "--max-steps")
    plan = Plan(labels, tuple(range(args.seeds)), first, max(1, round(first / 4)), {}, tune, kept)
    return ParetoPlan(plan, steps - first, models)


def _known(given: Sequence[str], known: Collection[str], what: str) -> None:
    for name in given:
        if name not in known:
            raise InputError(f"unknown {what} {name!r}{nearest(name, known)}")


def run(args: argparse.Namespace, base: Sequence[str]) -> int:
    """Carry the study out, or show its plan; returns 0, also where the budget ended first."""
    plan = make_plan(args, base)
    context = parse_command_line([*base, "--output-dir", "unused"])[0].context
    pricing = Pricing(context, args.logits, args.network, tuple(args.choices), args.blocks)
    if args.output_dir.exists() and not args.output_dir.is_dir():
        raise OutputDirError(f"{args.output_dir} is a file, not a folder")
    pareto = Pareto(plan, pricing, args.output_dir, args.hours)
    if args.dry_run:
        done = {point.key for point in pareto.points()}
        for model, start, key in pareto.wanted():
            print(f"{'done' if key in done else '    '}  seed {start.seed}  {model.family:20}  {model.name}")
        return 0
    finished = pareto.run()
    pareto.write()
    print(pareto_table.text(pareto_table.lines_of(pareto.points())))
    if not finished:
        print(f"The budget is spent; about {human(pareto.left())} are left: the same command goes on.")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    place = arguments.index("--") if "--" in arguments else len(arguments)
    args = parser().parse_args(arguments[:place])
    base = arguments[place + 1 :]
    return exit_code(lambda: run(args, base), "the same command goes on where this one stopped")


if __name__ == "__main__":
    sys.exit(main())
