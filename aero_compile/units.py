"""Numbers of bytes as people read them."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """Return `count` in decimal units, three significant digits: `999 B`, `1.23 MB`, `25.3 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB" if count < 999.5 else f"{count:,.0f} TB"


def table_lines(tables: int, weights: int = 0) -> list[str]:
    """Return the line of a bill for so many bytes of encrypted token tables and weights; none where there are none."""
    parts = [("table", tables), ("encrypted weights", weights)]
    found = " and ".join(f"{name}, once: {human_bytes(count)}" for name, count in parts if count)
    return [f"  {found}, which a client keeps for all texts"] if found else []
