"""Values inside an operator that a private check must look at: reported where they arise, compared with their limits.

An operator reports by `watch`; only within `watching`, and only what is asked for, anything is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from aero_compile.runtime.lazy_jax import jnp


@dataclass
class Watch:
    """What to look at, by name: (low, high), None for an end that needs no look; and what was found.

    `outside`: for each value that was looked at, how many of its entries lie outside, an array of no dimension.
    """

    wanted: Mapping[str, tuple[float | None, float | None]]
    outside: list[Any] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)


_CURRENT: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watching(wanted: Mapping[str, tuple[float | None, float | None]]) -> Iterator[Watch]:
    """Within this context operators look at `wanted`.

    Raises:
        AssertionError: an operator did not report something that was wanted.
    """
    watch = Watch(wanted)
    token = _CURRENT.set(watch)
    try:
        yield watch
    finally:
        _CURRENT.reset(token)
    assert watch.seen == set(wanted), f"an operator did not report {sorted(set(wanted) - watch.seen)}"


def watch(what: str, value: Any) -> None:
    """Report a value under the name that it has in the table of limits."""
    current = _CURRENT.get()
    if current is None or what not in current.wanted:
        return
    current.seen.add(what)
    current.outside.append(count_outside(value, *current.wanted[what]))


def count_outside(value: Any, low: Any | None, high: Any | None) -> Any:
    """How many entries lie below `low` or above `high`: numbers, or arrays of the shape of `value`.

    Both ends are compared at once.
    """
    ends = [low - value] if low is not None else []
    ends += [value - high] if high is not None else []
    if len(ends) == 1:
        return jnp().where(ends[0] > 0.0, 1.0, 0.0).sum()
    below, above = jnp().stack(ends) > 0.0
    return jnp().where(below | above, 1.0, 0.0).sum()
