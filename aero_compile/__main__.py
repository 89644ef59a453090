"""List the recipes, count the nonlinear ops of a model under each, write it as ONNX: aero-compile."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from aero_compile.census import census
from aero_compile.errors import InputError
from aero_compile.exit_codes import exit_code
from aero_compile.files import refuse_existing
from aero_compile.pipeline import transform
from aero_compile.plain_help import HelpParser
from aero_compile.recipe.page import recipe_page
from aero_compile.recipe.recipe import PASSES, recipe_names, recipes, resolve
from aero_compile.version import __version__

PAPER = [name for name, recipe in recipes().items() if recipe.group == "architectures of the paper"]

EXAMPLES = """examples:
  aero-compile recipes
  aero-compile census --model gpt2
  aero-compile census --model my_package.models:make --recipes softmax_only,SM+R --seq-len 256
  aero-compile census --onnx decoder.onnx
  aero-compile export --model runs/mine decoder.onnx

to train a transformed model:  python -m aero_compile.retrain --help
"""


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = HelpParser(prog="aero-compile", description=__doc__, epilog=EXAMPLES, formatter_class=form)
    parser.add_argument("--version", action="version", version=f"aero_compile {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    listing = commands.add_parser("recipes", help="all named recipes and passes")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.add_argument("--markdown", action="store_true", help="print the page docs/recipes.md")
    count = commands.add_parser("census", help="nonlinear ops that each recipe leaves in a model")
    count.add_argument(
        "--model",
        default="gpt2",
        help="Hub name (its configuration is enough), local folder, config.json, saved artifact, "
        "package.module:factory, or one of the shapes tiny, gpt2, pythia-70m (default: %(default)s)",
    )
    count.add_argument("--from-scratch", action="store_true", help="taken for granted: a census needs no weights")
    count.add_argument("--onnx", metavar="FILE", help="count what an ONNX file of any exporter holds instead")
    count.add_argument(
        "--recipes",
        help="names, labels or lists of passes, separated by commas, or by ; (default: the paper's architectures; "
        "a saved artifact is counted as it is)",
    )
    count.add_argument(
        "--seq-len", type=int, metavar="T", help="tokens (default: 128; of an ONNX file, what it is fixed to)"
    )
    count.add_argument("--json", action="store_true", help="print JSON")
    _add_export(commands)
    return parser


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write a model as ONNX, compared with PyTorch in onnxruntime",
        description="Write a model's logits as an ONNX file, and compare it with the model in onnxruntime before it "
        "gets its name. --model is as for census; a saved artifact is written as it is unless --recipe is given.",
    )
    export.add_argument("out", metavar="OUT.onnx", help="the file to write")
    export.add_argument("--overwrite", action="store_true", help="replace OUT.onnx if it exists")
    export.add_argument("--model", required=True, help="as for census")
    export.add_argument("--recipe", help="name, label or list of passes (default: softmax_only; none for an artifact)")
    export.add_argument("--from-scratch", action="store_true", help="random weights in the model's shape")
    export.add_argument(
        "--seq-len",
        type=int,
        default=128,
        metavar="T",
        help="longest sequence, where the model has no limit of its own",
    )
    export.add_argument(
        "--tolerance", type=float, default=1e-4, help="share of the largest logit (default: %(default)s)"
    )
    export.add_argument("--opset", type=int, default=20, help="version of the operator set (default: %(default)s)")
    export.add_argument("--json", action="store_true", help="print JSON")


def _list_recipes(as_json: bool) -> None:
    found = list(recipes().values())
    if as_json:
        rows = [
            {
                "name": recipe.name,
                "label": recipe.label,
                "group": recipe.group,
                "passes": recipe.text,
                "knobs": recipe.knobs,
                "remains": list(recipe.remains),
                "preserves_numerics": recipe.preserves_numerics,
                "description": recipe.description,
            }
            for recipe in found
        ]
        print(json.dumps(rows, indent=1))
        return
    for group, members in itertools.groupby(found, key=lambda recipe: recipe.group):
        print(f"{group}\n  {'name':<24} {'label':<20} {'remains':<12} {'same function':<14} passes")
        for recipe in members:
            same = "yes" if recipe.preserves_numerics else "no"
            remains = "+".join(recipe.remains)
            print(f"  {recipe.name:<24} {recipe.label:<20} {remains:<12} {same:<14} {recipe.text or '(none)'}")
        print()
    print("labels combine freely, such as SM(t)+LN+R(last:3)+ScFFN; EReg(label) asks for entropy regularization\n")
    print("passes (combine them with commas; options, here with their defaults, in braces):")
    for name, kind in PASSES.items():
        options = ", ".join(f"{field.name}={field.default}" for field in dataclasses.fields(kind))
        effect = "preserves the function at its defaults" if kind.preserves_numerics else "changes the function"
        print(f"  {name + (f'{{{options}}}' if options else ''):<76} {effect}")


def _export(args: argparse.Namespace) -> None:
    from aero_compile.onnx.export import export_onnx
    from aero_compile.training.models import find_model, with_length

    refuse_existing(Path(args.out), args.overwrite)
    source = find_model(args.model, from_scratch=args.from_scratch, overrides=None, context=args.seq_len)
    recipe = resolve(args.recipe or ("baseline" if source.transformed else "softmax_only"))
    torch.manual_seed(0)
    captured = transform(source.build(50257, None), "baseline")
    model = transform(captured, with_length(recipe, captured.max_positions, args.seq_len))
    report = export_onnx(model, args.out, tolerance=args.tolerance, opset=args.opset)
    print(json.dumps(report.to_dict(), indent=1) if args.json else report)


def _count_file(args: argparse.Namespace) -> None:
    from aero_compile.onnx.census import onnx_census

    counted = onnx_census(args.onnx, args.seq_len)
    print(json.dumps(counted.to_dict(), indent=1) if args.json else counted)


def _count(args: argparse.Namespace) -> None:
    from aero_compile.training.models import find_shape

    length = 128 if args.seq_len is None else args.seq_len
    wanted = [resolve(name) for name in recipe_names(args.recipes or ",".join(PAPER))]
    source = find_shape(args.model, length)
    if source.transformed and args.recipes:
        raise InputError(
            f"{args.model} is a saved artifact, which has its recipe already: a count of other recipes needs the model "
            "that it was made of; leave out --recipes to count the artifact"
        )
    with torch.device("meta" if source.from_scratch else "cpu"):
        model = source.build(50257, None)
    if source.transformed:
        saved: Any = model
        rows = {saved.recipe or "as captured": census(saved, length)}
    else:
        captured = transform(model, "baseline")
        rows = {recipe.label or recipe.text: census(transform(captured, recipe), length) for recipe in wanted}
    if args.json:
        print(json.dumps({label: row.to_dict() for label, row in rows.items()}, indent=1))
        return
    for label, row in rows.items():
        print(f"{label:<13} {row}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (2 for an error of the user's)."""
    args = _parser().parse_args(argv)
    return exit_code(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.command == "recipes" and args.markdown:
        print(recipe_page(), end="")
    elif args.command == "recipes":
        _list_recipes(args.json)
    elif args.command == "export":
        _export(args)
    elif args.onnx:
        _count_file(args)
    else:
        _count(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
