"""Help for a terminal: what command lines print carries none of the markup of docstrings."""

from __future__ import annotations

import argparse
import re
from typing import Any

from aero_compile.terminal import open_streams

_ROLE = re.compile(r":(?:[a-z]+:)?[a-z]+:`[~!]?([^`]*)`")


def plain(text: str) -> str:
    """The text without backticks and Sphinx roles."""
    return _ROLE.sub(r"\1", text).replace("`", "")


class PlainHelp:
    """Makes the help of a parser, and of its subcommands, plain; stands in front of the parser's class."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse a command line; help and errors can be printed whatever the encoding of the standard streams is."""
        open_streams()
        return super().parse_known_args(*args, **kwargs)  # type: ignore[misc]

    def format_help(self) -> str:
        """The help, as it is printed."""
        found: str = super().format_help()  # type: ignore[misc]
        return plain(found)


class HelpParser(PlainHelp, argparse.ArgumentParser):
    """The parser of every command of ours."""
