"""Ranges of numbers that an option may have: declared beside the option, checked in one place.

An option of ours carries its range as `Annotated[int, at_least(1)]`; those of Trainer stand in a table by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, get_type_hints

from aero_compile.errors import InputError


@dataclass(frozen=True)
class Range:
    """Finite numbers from `least` to `most`, in words; `without` names ends that are left out.

    `whole_from`: numbers from here on must be whole (-inf: all are integers; 1: shares may be fractions).
    `also`: a number outside that means something else, such as -1 for "not set".
    """

    words: str
    least: float = -math.inf
    most: float = math.inf
    without: tuple[float, ...] = ()
    whole_from: float = math.inf
    also: float | None = None

    def __contains__(self, value: Any) -> bool:
        kind: Any = Integral if self.whole_from == -math.inf else Real
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        found = float(value)
        if found == self.also:
            return True
        if not math.isfinite(found) or found in self.without or not self.least <= found <= self.most:
            return False
        return found < self.whole_from or found.is_integer()


def whole(least: int, most: float = math.inf, also: int | None = None) -> Range:
    """Whole numbers of at least `least`."""
    upper = "" if math.isinf(most) else f" and at most {most:,.0f}"
    other = "" if also is None else f", or {also} for no limit"
    return Range(f"a whole number of at least {least}{upper}{other}", least, most, whole_from=-math.inf, also=also)


def number(least: float) -> Range:
    """Numbers of at least `least`."""
    return Range(f"a number of at least {least:g}", least)


POSITIVE = Range("a number above 0", 0, without=(0,))
SHARE = Range("a share from 0 to 1", 0, 1)
PART = Range("a share above 0 and below 1", 0, 1, without=(0, 1))
BELOW_ONE = Range("a number of at least 0 and below 1", 0, 1, without=(1,))
UP_TO_ONE = Range("a number above 0 and at most 1", 0, 1, without=(0,))
STEPS = Range("whole steps of at least 1, or a share of the run above 0 and below 1", 0, without=(0,), whole_from=1)
SOME_STEPS = Range("whole steps of at least 0, or a share of the run below 1", 0, whole_from=1)


@cache
def ranges_of(kind: type) -> Mapping[str, Range]:
    """The ranges that the fields of a dataclass are annotated with, by field."""
    hints = get_type_hints(kind, include_extras=True)
    notes = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: one for name, several in notes.items() for one in several if isinstance(one, Range)}


def check_ranges(values: object, ranges: Mapping[str, Range], flags: Mapping[str, str] | None = None) -> None:
    """Raise InputError for the first attribute of `values` outside of its range; None is no number and passes.

    `flags`: what the command line calls an attribute, where that is not its name.
    """
    for name, allowed in ranges.items():
        value: Any = getattr(values, name)
        if value is not None and value not in allowed:
            flag = (flags or {}).get(name, f"--{name.replace('_', '-')}")
            raise InputError(f"{flag} must be {allowed.words}, not {value}")
