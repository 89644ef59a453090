"""Numbers by name in an option's text: `kl=1,hidden=0.5`."""

from __future__ import annotations

import math

from aero_compile.errors import InputError


def named_numbers(option: str, text: str | None, example: str) -> dict[str, float]:
    """The numbers of `name=number,…`, each at least 0; empty for no text.

    `option` and `example` are for the message.

    Raises:
        InputError: an item that is none, a name given twice, or a value that is no number of at least 0.
    """
    found: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in (text or "").split(","))):
        name, _, value = (part.strip() for part in item.partition("="))
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not name or not (math.isfinite(number) and number >= 0):
            raise InputError(f"{option}: {item!r} is not name=number with a number of at least 0, such as {example}")
        if name in found:
            raise InputError(f"{option} gives {name} twice")
        found[name] = number
    return found
