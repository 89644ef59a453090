"""The ring, and the fixed-point format in it, for which functions are traced; outside, numbers are floats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

WORD = 64
"""Bits of the ring in which matrix products pack their answers, and share-level kernels work."""

_FORMAT: ContextVar[tuple[int, int, bool] | None] = ContextVar("format", default=None)


@contextmanager
def fixed_point(fraction_bits: int, ring_bits: int = WORD, offline: bool = False) -> Iterator[None]:
    """Within this context functions are traced for a ring of so many bits, of which `fraction_bits` are a fraction.

    `offline`: what does not depend on the tokens is computed before they are known.
    """
    token = _FORMAT.set((fraction_bits, ring_bits, offline))
    try:
        yield
    finally:
        _FORMAT.reset(token)


def fraction_bits() -> int | None:
    """Of the format for which a function is traced; None: numbers are floats."""
    found = _FORMAT.get()
    return None if found is None else found[0]


def in_two_phases() -> bool:
    """Whether a function is traced for what is computed before the tokens are known, and what with them."""
    found = _FORMAT.get()
    return found is not None and found[2]


def in_words() -> bool:
    """Whether a function is traced for the 64-bit ring."""
    found = _FORMAT.get()
    return found is not None and found[1] == WORD
