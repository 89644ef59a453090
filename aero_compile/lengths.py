"""Length of a text where none was asked for."""

from __future__ import annotations

DEFAULT_LENGTH = 128
"""Tokens of the paper's tables."""


def default_length(positions: int | None, usual: int = DEFAULT_LENGTH) -> int:
    """Return the tokens of a text whose length was not asked for: `usual`, or all that a model takes if it takes fewer.

    `positions`: that the model has; None: any number.
    """
    return usual if positions is None else min(usual, positions)
