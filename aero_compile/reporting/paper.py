"""A paper's figure beside ours, row by row: what `Row.paper` holds, as cells of a table."""

from __future__ import annotations

from collections.abc import Sequence

from aero_compile.reporting.report import Row, about, aligned


def ratio(row: Row) -> float | None:
    """Return how many times more bytes the paper reports than we move; None for a row that it does not have."""
    if row.paper is None or not row.bytes:
        return None
    return float(row.paper["comm_gb"]) * 1e9 / row.bytes


def gigabytes(count: float) -> str:
    """Return bytes in GB of 10⁹: two decimals as papers print them, three digits where those would say little."""
    found = count / 1e9
    return f"{found:,.2f}" if found >= 0.1 else f"{found:.3g}"


WORDS = frozenset({0, 8, 9, 10})
"""Columns of words, to be aligned to the left."""


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the comparison's head and its lines as text; the columns `WORDS` hold no figures."""
    head = ["architecture", "layers", "T", "paper, GB", "ours, GB", "paper / ours", "messages", "seconds"]
    head += ["figures", "nonlinear ops, paper", "nonlinear ops, ours"]
    lines = []
    for row in rows:
        times = ratio(row)
        lines.append(
            [row.label, str(row.layers), str(row.seq_len)]
            + ["–" if row.paper is None else gigabytes(row.paper["comm_gb"] * 1e9)]
            + [about(row, gigabytes(row.bytes)), "–" if times is None else f"{times:.2f}×"]
            + [about(row, f"{row.messages:,}"), about(row, f"{row.seconds:.1f}")]
            + ["estimated" if row.estimated else "measured"]
            + ["–" if row.paper is None else row.paper["nonlinear_ops"], row.nonlinear_ops or "none"]
        )
    return head, lines


def text_table(rows: Sequence[Row], width: int | None = None) -> str:
    """Return the comparison for a terminal; where it is wider than `width`, the nonlinear ops go below it."""
    head, lines = cells(rows)
    table = aligned(head, lines, WORDS)
    if width is None or max(map(len, table)) <= width:
        return "\n".join(table)
    below = []
    for line in lines:
        below += [f"  {line[0]} (L={line[1]}, T={line[2]})", f"    paper {line[-2]}", f"    ours  {line[-1]}"]
    narrow = aligned(head[:-2], [line[:-2] for line in lines], WORDS)
    return "\n".join([*narrow, "", "nonlinear ops that remain:", *below])
