"""Standard streams on which no print fails: one that is closed, full, or cannot encode a character loses no result."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
from typing import Any, TextIO

from aero_compile.errors import InputError

ASCII = {
    "×": "x",
    "·": "*",
    "≈": "~",
    "≤": "<=",
    "≥": ">=",
    "≠": "!=",
    "±": "+-",
    "−": "-",
    "→": "->",
    "←": "<-",
    "–": "-",
    "—": "-",
    "…": "...",
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
    "√": "sqrt",
    "∞": "inf",
    "²": "^2",
    "█": "#",
    "λ": "lambda",
    "γ": "gamma",
    "α": "alpha",
    "β": "beta",
    "σ": "sigma",
    "ε": "epsilon",
    "µ": "u",
}
"""Our characters outside of ASCII, in ASCII."""

_HANDLER = "aero_compile.ascii"


def _in_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    """Write what an encoding lacks in ASCII; a character that is not ours as its escape, which JSON reads."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(ASCII.get(each) or json.dumps(each)[1:-1] for each in lacking), error.end


def open_streams() -> None:
    """Make standard input, output and error of this process fit for use; may be called again.

    An encoding that lacks a character (`LC_ALL=C`, `PYTHONIOENCODING=ascii`) writes it in ASCII, where Python raises
    `UnicodeEncodeError`. A stream that the caller has closed, which Python gives as None, leads to nothing.
    """
    codecs.register_error(_HANDLER, _in_ascii)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream: Any = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for the process's life
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER if mode == "w" else "surrogateescape")  # `typed` reads the latter


def discard(stream: TextIO) -> None:
    """Let what is still to be written to a stream go nowhere, so that Python does not fail on it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def typed(text: str) -> str:
    """Return a text of the command line, or of standard input, as it was typed, where the locale alone is ASCII.

    Raises:
        InputError: it is not UTF-8.
    """
    if not any("\ud800" <= each <= "\udfff" for each in text):
        return text
    try:
        return text.encode("utf-8", "surrogateescape").decode()
    except UnicodeError as error:
        raise InputError(f"a text is not UTF-8: {text.encode('ascii', 'backslashreplace')[:80].decode()}") from error
