"""Text on the command line: options that name a dataset and a tokenizer, and blocks of tokens of it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from aero_compile.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


def add_text(parser: argparse.ArgumentParser) -> None:
    """Add what says where text comes from, and how it is cut into tokens."""
    add = parser.add_argument
    add("--dataset", default="stdlib", help="stdlib, files, a folder or a Hub dataset (default: %(default)s)")
    add("--text-column", metavar="NAME", help="column of the dataset that holds the text")
    add("--tokenizer", help="Hub name or folder (default: the model's own)")


def blocks_of_text(
    args: argparse.Namespace, own: str | None, count: int, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """At most `count` blocks of token ids `[N, T]` of each side of the dataset, T being `args.seq_len`.

    `own`: the tokenizer that belongs to the model; `most`: the longest T that it takes. Raises InputError without any
    tokenizer, and DataError.
    """
    import torch

    from aero_compile.training.data import load_text, prepare

    name = args.tokenizer or own
    if name is None:
        raise InputError(f"--model {args.model} has no tokenizer of its own: name one with --tokenizer")
    length = args.seq_len if most is None else min(args.seq_len, most)
    tokens = count * length
    data = prepare(
        load_text(args.dataset, column=args.text_column),
        context=length,
        tokenizer=name,
        max_train_tokens=tokens,
        max_validation_tokens=tokens,
    )
    sides: Any = (data.train, data.validation)
    train, validation = (torch.stack([side[i]["input_ids"] for i in range(len(side))]) for side in sides)
    return train, validation
