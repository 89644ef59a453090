"""Predict what a private forward of a model costs in Cheetah, without running it: bytes, messages, rounds, seconds.

Of a shape that has no weights, or of a Hub name, of which the configuration alone is read, the weights count as
unknown: as those of a trained model. A saved artifact is taken as it is.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from aero_compile.commands.options import MODEL, add_costs, positive
from aero_compile.errors import InputError

if TYPE_CHECKING:
    from aero_compile.model import TransformedModel

SUMMARY = "bytes, messages, rounds and seconds of a private forward, without running it"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add = parser.add_argument
    add("--model", required=True, help=MODEL.format(hub=" (its configuration is enough)"))
    add("--recipe", help="name, label or list of passes (default: softmax_only; none for an artifact)")
    add("--seq-len", type=positive, default=128, metavar="T", help="tokens (default: %(default)s)")
    add("--batch", type=positive, default=1, metavar="B", help="sequences (default: %(default)s)")
    text = "logits of the last position, for the next token, or of all (default: %(default)s)"
    add("--logits", choices=["last", "all"], default="last", help=text)
    text = "the bill of generating so many tokens behind a prompt of --seq-len, keys and values being kept"
    add("--new-tokens", type=positive, metavar="N", help=text)
    add_costs(parser)
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the estimate."""
    from aero_compile.runtime.costs.model import estimate

    found = estimate(
        _model(args),
        args.seq_len,
        batch=args.batch,
        network=args.network,
        logits=args.logits,
        guards=args.guards,
        public=args.public,
        offline=args.offline,
        lookup=args.lookup,
        new_tokens=args.new_tokens,
    )
    print(found.to_json() if args.json else found)
    return 0


def _model(args: argparse.Namespace) -> TransformedModel:
    """The model under its recipe, without the weights if they are random."""
    import torch

    from aero_compile.pipeline import transform
    from aero_compile.recipe.recipe import resolve
    from aero_compile.training.models import find_shape, with_length

    source = find_shape(args.model, args.seq_len)
    if source.transformed and args.recipe:
        raise InputError(
            f"{args.model} is a saved artifact, which has its recipe already: leave out --recipe, or name the model "
            "that it was made of"
        )
    torch.manual_seed(0)
    captured = transform(source.build(50257, None), "baseline")
    if source.transformed:
        return captured
    recipe = with_length(resolve(args.recipe or "softmax_only"), captured.max_positions, args.seq_len)
    tokens = torch.randint(0, captured.vocab_size, (4, args.seq_len))  # for recipes that freeze norms
    model = transform(captured, recipe, calibration=tokens)
    return _without_weights(model) if source.from_scratch else model


def _without_weights(model: TransformedModel) -> TransformedModel:
    """Move parameters to the meta device, where they count as a trained model's; what is tied stays so."""
    import torch

    moved: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = moved.setdefault(id(weight), torch.nn.Parameter(weight.to("meta")))
    return model
