"""Serve a model to clients that keep their texts private: they receive logits, and no weights.

MODEL is compiled here (a saved artifact, a GGUF file, or a folder of a Hugging Face model), or is a folder of compiled
programs. The log goes to standard error, one JSON object a line, without tokens, logits or keys. SIGINT and SIGTERM end
the server.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from aero_compile.commands.options import add_lookup, add_way, add_weights_at_client, gigabytes, names, positive, way_of
from aero_compile.errors import InputError

KEYWORDS = {"address": "--listen", "folder": "--keep", "set_up": "--no-set-up", "tls": "--certs"}
"""Keywords of `aero_compile.serve` that are called otherwise here."""
SUMMARY = "serve a model to several clients that keep their texts private"


def counts(text: str) -> tuple[int, ...]:
    """Parse numbers of tokens divided by commas."""
    return tuple(positive(each) for each in names(text))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add = parser.add_argument
    text = "saved artifact, GGUF file, folder of a Hugging Face model, or folder of compiled programs"
    add("source", metavar="MODEL", type=Path, help=text)
    add("--listen", required=True, metavar="HOST:PORT", help="where clients find it")
    text = (
        "tokens that a generated text may have with its prompt; several divided by commas: a text grows through them; "
    )
    text += "without it the server generates nothing"
    add("--room", type=counts, default=(), metavar="LIST", help=text)
    text = "how many tokens of a prompt are computed at once, divided by commas: a program for each number"
    add("--fills", type=counts, default=(), metavar="LIST", help=text)
    text = "how many tokens of a text are checked at once where clients guess, divided by commas: a program for each"
    add("--checks", type=counts, default=(), metavar="LIST", help=text)
    text = (
        "hold one sum instead of the values of all positions, of heads that attend to all of them alike; a text that "
    )
    text += "does not go on where the last one ended is computed anew"
    add("--running-sums", action="store_true", help=text)
    text = "lengths of whole texts whose logits clients may ask for, divided by commas"
    add("--lengths", type=counts, default=(), metavar="LIST", help=text)
    text = "private folder where compiled programs are kept for the next start (default: nowhere)"
    add("--keep", type=Path, metavar="DIR", help=text)
    text = "weights that clients are given, divided by commas: embedding, position, head, names or patterns of names"
    add("--public", type=names, default=(), metavar="LIST", help=text)
    text = "compile generation so that most of a token is computed before it, while a client asks for nothing"
    add("--offline", action="store_true", help=text)
    add_lookup(parser)
    add_weights_at_client(parser)
    text = "compile for a network: wan, lan or MBPS:RTT_MS (default: %(default)s)"
    add("--network", default="loopback", metavar="NET", help=text)
    text = "where root starts the server: user that each session becomes once it has read the weights (default: root)"
    add("--user", metavar="NAME", help=text)
    add_way(parser, "server")
    group = parser.add_argument_group("limits")
    many = group.add_argument
    many("--workers", type=positive, metavar="N", help="computations at once (default: 1)")
    many("--max-waiting", type=int, metavar="N", help="requests that wait for their turn (default: 16)")
    many(
        "--max-sessions", type=positive, metavar="N", help="clients at once, each with the weights' memory (default: 4)"
    )
    text = "memory that the process of one session may hold (default: what its programs and weights can need)"
    many("--max-session-memory", type=gigabytes, metavar="GB", help=text)
    many(
        "--max-tokens-per-client",
        type=positive,
        metavar="N",
        help="tokens computed for a client, over all starts of the server; needs --state (default: any number)",
    )
    text = "runs of a program that are prepared for a client at once, with --offline (default: 16)"
    many("--max-prepared", type=int, metavar="N", help=text)
    text = "rows of products that are kept prepared for a client by the batch of 4,096, with --offline (default: none)"
    many("--prepare", dest="max_prepared_rows", type=int, metavar="ROWS", help=text)
    text = "seconds after which a client that asks for nothing is sent away (default: 300)"
    many("--idle-seconds", type=float, metavar="S", help=text)
    text = "private folder where the tokens that clients have spent are kept, for one server at a time"
    add("--state", type=Path, metavar="DIR", help=text)
    text = "answer Prometheus at this port of 127.0.0.1 (default: do not)"
    add("--metrics-port", type=int, metavar="PORT", help=text)
    add(
        "--no-set-up", dest="set_up", action="store_false", help="leave keys and transfers to a session's first forward"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    from aero_compile.serving.options import Limits
    from aero_compile.serving.server import serve

    asked = {name: getattr(args, name) for name in vars(Limits()) if getattr(args, name, None) is not None}
    if not args.source.exists():
        raise InputError(f"there is no file or folder {args.source}")
    if args.max_prepared_rows and not args.offline:
        raise InputError(f"--prepare {args.max_prepared_rows} is of what is prepared before the tokens: add --offline")
    if args.offline and args.lengths:
        raise InputError("--offline prepares for --room alone: whole texts (--lengths) are served without")
    compiling: dict[str, Any] = {"public": args.public, "network": args.network, "lookup": args.lookup}
    compiling |= {"offline": True} if args.offline else {}
    compiling |= {"weights_at_client": True} if args.weights_at_client else {}
    serve(
        args.source,
        args.listen,
        lengths=args.lengths,
        room=args.room,
        fills=args.fills,
        checks=args.checks,
        running_sums=args.running_sums,
        folder=args.keep,
        compiling=compiling,
        limits=Limits(**asked),
        metrics_port=args.metrics_port,
        state=args.state,
        set_up=args.set_up,
        user=args.user,
        **way_of(args, "server"),
    )
    return 0
