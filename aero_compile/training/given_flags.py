"""The flags of a command line as text, before anything parses them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

SECRET = ("hub_token",)
"""Flags that no record keeps."""


def given_flags(arguments: Sequence[str]) -> dict[str, str]:
    """The flags of a command line with their last values, by name; of one without a value, an empty text."""
    found: dict[str, str] = {}
    for each, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if each.startswith("--"):
            own = each.partition("=")[2] if "=" in each else following
            found[name_of(each)] = "" if own is following and following.startswith("--") else own
    return found


def name_of(argument: str) -> str:
    """The name of `--some-flag` or `--some-flag=value`: `some_flag`; λ is `lambda` under either of its names."""
    name = argument[2:].partition("=")[0].replace("-", "_")
    return "lambda" if name == "entropy_weight" else name


def without(arguments: Sequence[str], names: Collection[str]) -> list[str]:
    """A command line without the flags of these names and their values."""
    left, dropped = [], False
    for each in arguments:
        if each.startswith("--"):
            dropped = name_of(each) in names
        if not dropped:
            left.append(each)
    return left
