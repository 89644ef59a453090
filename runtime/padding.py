"""Tokens that mean nothing, where a program takes more than a text has."""

from __future__ import annotations

import secrets
from collections.abc import Sequence


def filled_up(ids: Sequence[int], count: int, vocabulary: int) -> tuple[int, ...]:
    """`ids`, and tokens up to `count` of them, each drawn uniformly from the operating system's generator.

    What follows a text changes nothing before it. Repeated tokens would make equal rows, whose traces a server could
    look for, and which would show where the text ends.
    """
    return (*map(int, ids), *(secrets.randbelow(vocabulary) for _ in range(count - len(ids))))
