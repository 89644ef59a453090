"""Options that several commands have, and `pi_bench.py` too."""

from __future__ import annotations

import argparse
from typing import Any

from aero_compile.lengths import DEFAULT_LENGTH

MODEL = (
    "Hub name{hub}, local folder, GGUF file, config.json, saved artifact, package.module:factory, or one of the shapes "
    "tiny, gpt2, pythia-70m"
)


LENGTH = f"tokens (default: {DEFAULT_LENGTH}, or as many as the model takes if these are fewer)"


def positive(text: str) -> int:
    """Parse a whole number of at least 1 for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def gigabytes(text: str) -> int:
    """Parse a positive number of gigabytes (10^9 bytes) for argparse; returns bytes."""
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of gigabytes")
    return round(value * 1e9)


def names(text: str) -> tuple[str, ...]:
    """Parse names divided by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def add_lookup(group: Any) -> None:
    """Add how tokens are looked up: to a parser, or a group of it."""
    text = (
        "how tokens look rows up in the server's table: one-hot, by products; encrypted, in one message (39 kB a token "
        "of GPT-2 small), for which a client downloads the encrypted table once (8 bytes a number, 309 MB); or auto, "
        "whichever is cheaper, the table not counted (default: %(default)s)"
    )
    group.add_argument("--lookup", choices=["auto", "encrypted", "one-hot"], default="auto", help=text)


def add_weights_at_client(group: Any) -> None:
    """Add that clients hold encrypted weights: to a parser, or a group of it."""
    text = (
        "clients multiply with the server's matrices, encrypted, where that is cheaper than SPU's product; they "
        "download 24 bytes for each weight once, which is not counted"
    )
    group.add_argument("--weights-at-client", action="store_true", help=text)


def add_costs(group: Any) -> None:
    """Add what decides the costs of a private forward beside the model: to a parser, or a group of it."""
    text = "with the private checks of ranges that programs for two hosts have"
    group.add_argument("--guards", action="store_true", help=text)
    text = "weights that the client is given, divided by commas: embedding, position, head, names or patterns of names"
    group.add_argument("--public", type=names, default=(), metavar="LIST", help=text)
    text = (
        "prepare what does not depend on the tokens before; bytes, messages and seconds are then those with the tokens"
    )
    group.add_argument("--offline", action="store_true", help=text)
    text = (
        "with --offline: tokens for which products with the server's matrices are prepared at once, by the batch of "
        "4,096 rows where that is cheaper; a run's share is in its bill (default: the tokens of the runs; 0: none)"
    )
    group.add_argument("--prepare", type=int, metavar="ROWS", help=text)
    add_lookup(group)
    add_weights_at_client(group)
    text = "what to emulate (or assume) between the parties: wan, lan or MBPS:RTT_MS; default: loopback, nothing"
    group.add_argument("--network", default="loopback", metavar="NET", help=text)
