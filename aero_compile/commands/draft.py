"""The options by which a client guesses tokens ahead."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from aero_compile.commands.options import positive
from aero_compile.errors import InputError

if TYPE_CHECKING:
    from aero_compile.runtime.generation.session import Guess


class Checking(Protocol):
    """A session that may check guesses."""

    @property
    def most_guesses(self) -> int:
        """How many at once; 0: none."""

    @property
    def vocabulary(self) -> int:
        """Tokens that its model knows."""


def add_draft(parser: argparse.ArgumentParser) -> None:
    """Add what guesses tokens ahead, and how many."""
    group = parser.add_argument_group("draft")
    text = (
        "guess tokens in the clear, which are checked several at once and leave the text as it is: ngram (what "
        "followed the last tokens before follows again), or a small public model with the same tokenizer: an artifact, "
        "a folder or a Hub name, as safetensors, or a GGUF file"
    )
    group.add_argument("--draft", metavar="MODEL", help=text)
    text = "tokens to guess at once (default: as many as the server checks, serve --checks)"
    group.add_argument("--draft-tokens", type=positive, metavar="N", help=text)


def draft_of(args: argparse.Namespace, tokenizer: Any) -> Callable[[Checking], Guess] | None:
    """What guesses in a session, loaded now; None where nobody guesses."""
    if args.draft is None:
        if args.draft_tokens is not None:
            raise InputError("--draft-tokens says how many --draft guesses: give --draft too")
        return None
    if args.bucket > 1:
        raise InputError("--draft and --bucket exclude each other: checks would show where the prompt ends")
    from aero_compile.decoding.drafts import make_draft

    made = make_draft(args.draft, tokenizer)

    def begun(session: Checking) -> Guess:
        if not session.most_guesses:
            raise InputError("the server checks no guesses: it was started without --checks. Leave out --draft")
        return made(min(session.most_guesses, args.draft_tokens or session.most_guesses), session.vocabulary)

    return begun
