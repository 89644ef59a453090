"""What a lookup under encryption takes, without the rest of a forward: bytes and processor seconds.

`OMP_NUM_THREADS=1 python benchmarks/lookup.py` measures 128 tokens of GPT-2 small's table on one core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from aero_compile.commands.options import positive
from aero_compile.exit_codes import exit_code
from aero_compile.plain_help import HelpParser
from aero_compile.runtime.kernels.lookup_table import encrypted_table, look_up, opened
from aero_compile.runtime.kernels.words import Words
from aero_compile.units import human_bytes

T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Look random rows of a random table up; print what it took, and the largest error in units of 2^-18."""
    parser = HelpParser(description=(__doc__ or "").split("\n\n")[0])
    for name, default in (("vocabulary", 50257), ("width", 768), ("tokens", 128)):
        parser.add_argument(f"--{name}", type=positive, default=default, help="default: %(default)s")
    args = parser.parse_args(argv)
    return exit_code(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Make the table, look the rows up, and compare them."""
    draw = np.random.default_rng(0)
    table = draw.integers(-(2**41), 2**41, (args.vocabulary, args.width)).view(np.uint64)
    ids = draw.integers(args.vocabulary, size=args.tokens).astype(np.uint64)

    (server, client), seconds = _timed(lambda: encrypted_table(table))
    _print("the table, once", sum(words.nbytes for words in client.values()), seconds)
    (sent, mine), seconds = _timed(lambda: look_up(client, ids))
    _print("the client", sent.nbytes, seconds)
    theirs, seconds = _timed(lambda: opened(server, sent))
    _print("the server", 0, seconds)
    off: Words = theirs + mine - table[ids.astype(np.int64)]
    print(f"off by at most {int(np.abs(off.view(np.int64)).max()) / 2**18:.4f} units")
    return 0


def _timed(run: Callable[[], T]) -> tuple[T, float]:
    begun = time.process_time()
    return run(), time.process_time() - begun


def _print(who: str, sent: int, seconds: float) -> None:
    print(f"{who:<16} {human_bytes(sent):>10} {seconds:>9.4f} s")


if __name__ == "__main__":
    raise SystemExit(main())
