"""Budgets as text: bytes, seconds, rounds or messages of a private forward."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass

from aero_compile.errors import InputError
from aero_compile.units import human_bytes

_UNITS: Mapping[str, tuple[str, float]] = {
    **{unit.lower(): ("bytes", 1000.0**power) for power, unit in enumerate(("B", "kB", "MB", "GB", "TB"))},
    **{unit.lower(): ("bytes", 1024.0**power) for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), 1)},
    **dict.fromkeys(("s", "second", "seconds"), ("seconds", 1.0)),
    **dict.fromkeys(("min", "minute", "minutes"), ("seconds", 60.0)),
    **dict.fromkeys(("round", "rounds"), ("rounds", 1.0)),
    **dict.fromkeys(("message", "messages"), ("messages", 1.0)),
}


@dataclass(frozen=True)
class Budget:
    """At most `limit` of `measure`, a field of an estimate: bytes, seconds, rounds or messages."""

    measure: str
    limit: float

    def __str__(self) -> str:
        return amount(self.measure, self.limit)


def parse_budget(text: str | float) -> Budget:
    """Read a budget such as `0.8 GB`, `40 s`, `900 rounds`, `5000 messages`; a number is one of bytes.

    Raises:
        InputError: no positive number, or a unit that is none of these.
    """
    if isinstance(text, numbers.Real) and not isinstance(text, bool):
        text = f"{float(text)!r} B" if math.isfinite(text) else str(text)
    match = re.fullmatch(r"\s*([0-9][0-9_,]*\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([a-z]+)\s*", str(text).lower())
    if match is None or match[2] not in _UNITS:
        raise InputError(
            f"{text!r} is no budget: write a number and a unit, as 0.8 GB, 40 s, 900 rounds or 5000 messages; in "
            "Python a number alone is one of bytes"
        )
    measure, factor = _UNITS[match[2]]
    limit = float(re.sub("[_,]", "", match[1])) * factor
    if not (math.isfinite(limit) and limit > 0):
        raise InputError(f"a budget must be a positive number, not {text!r}")
    return Budget(measure, limit)


def amount(measure: str, value: float) -> str:
    """So much of a measure, as people read it."""
    if measure == "bytes":
        return human_bytes(value)
    if measure == "seconds":
        return f"{value:,.2f} s" if value >= 1 else f"{value:.3g} s"
    return f"{value:,.0f} {measure}" if round(value) != 1 else f"1 {measure.removesuffix('s')}"
