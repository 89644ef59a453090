"""Help for a terminal: what command lines print carries none of the markup of docstrings."""

from __future__ import annotations

import argparse
import re

_ROLE = re.compile(r":(?:[a-z]+:)?[a-z]+:`[~!]?([^`]*)`")


def plain(text: str) -> str:
    """The text without backticks and Sphinx roles."""
    return _ROLE.sub(r"\1", text).replace("`", "")


class PlainHelp:
    """Makes the help of a parser, and of its subcommands, plain; stands in front of the parser's class."""

    def format_help(self) -> str:
        """The help, as it is printed."""
        found: str = super().format_help()  # type: ignore[misc]
        return plain(found)


class HelpParser(PlainHelp, argparse.ArgumentParser):
    """The parser of every command of ours."""
