"""Go on with a text privately: the server computes on secret shares and learns neither it nor what follows.

The prompt is --prompt, or what comes on standard input. The text is streamed to standard output; the bill (bytes of
both directions, messages, seconds, by token) goes to standard error. The server learns how long prompt and text are,
with --bucket about how long.
"""

from __future__ import annotations

import argparse
import sys

from aero_compile.commands.draft import add_draft, draft_of
from aero_compile.commands.link import add_client, open_session
from aero_compile.commands.options import positive
from aero_compile.errors import InputError

SUMMARY = "text from a server's model, which learns nothing of it but its length"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_client(parser)
    add_draft(parser)
    group = parser.add_argument_group("text")
    add = group.add_argument
    add("--prompt", metavar="TEXT", help="text to go on with (default: standard input, to its end)")
    add("--max-tokens", type=positive, default=32, metavar="N", help="tokens to generate (default: %(default)s)")
    text = "0 takes the likeliest token, 1 samples as the model has it (default: %(default)s)"
    add("--temperature", type=float, default=0.0, metavar="T", help=text)
    add("--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest tokens that have P together")
    add("--seed", type=int, metavar="N", help="of the sampling (default: another one every time)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end in front of this text; may be repeated")


def run(args: argparse.Namespace) -> int:
    """Generate the text."""
    from aero_compile.decoding.sampling import Sampler, Sampling
    from aero_compile.decoding.text import TextStream
    from aero_compile.runtime.generation.session import Token
    from aero_compile.training.tokenizer import load_tokenizer

    choose = Sampler(Sampling(args.temperature, args.top_p, args.seed))
    tokenizer = load_tokenizer(args.tokenizer)
    raw = tokenizer.backend_tokenizer
    ids = list(raw.encode(sys.stdin.read() if args.prompt is None else args.prompt, add_special_tokens=False).ids)
    if not ids:
        raise InputError("the prompt is empty: there is no token to go on from")
    stream = TextStream(raw, ids, args.stop)
    ends = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)

    def told(token: Token) -> bool:
        if token.id not in ends:
            print(stream.push(token.id), end="", flush=True)
        return stream.stopped

    draft = draft_of(args, tokenizer)
    with open_session(args) as session:
        guess = None if draft is None else draft(session)
        found = session.generate(ids, args.max_tokens, told, choose, ends, guess)
    print(stream.finish(), flush=True)
    print(found, file=sys.stderr)
    return 0
