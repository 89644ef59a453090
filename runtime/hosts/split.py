"""The seconds of a private forward in three parts: computing, sending bytes, and waiting for what is under way."""

from __future__ import annotations

from typing import Any

from aero_compile.console import human_bytes

SPLIT = ("computing", "sending", "waiting")
"""Columns of bills and estimates: what the seconds consist of."""


def split_line(bill: Any) -> str:
    """The three of a bill or an estimate, in one line."""
    waiting = f"{bill.waiting:.2f} s waiting ({bill.rounds:,.1f} round trips)"
    return f"  of it {bill.computing:.2f} s computing, {bill.sending:.2f} s sending, {waiting}"


def split_rows(bill: Any) -> list[str]:
    """The operators of a bill or an estimate under a heading; their rounds and the three where rounds are known."""
    split = bill.rounds is not None
    heading = f"  {'operator':<16}{'count':>6}{'bytes':>12}{'share':>8}{'messages':>10}{'seconds':>9}"
    heading += f"{'rounds':>10}" + "".join(f"{name:>11}" for name in SPLIT) if split else ""
    found = [heading]
    for row in bill.per_op:
        line = f"  {row['op']:<16}{row['count']:>6}{human_bytes(row['bytes']):>12}"
        line += f"{row['bytes'] / max(1, bill.bytes):>8.1%}{row['messages']:>10,}{row['seconds']:>9.2f}"
        line += f"{row['rounds']:>10,.1f}" + "".join(f"{row[name]:>11.2f}" for name in SPLIT) if split else ""
        found.append(line)
    return found
