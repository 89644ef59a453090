"""Numbers of bytes as people read them."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """Return `count` in decimal units, three significant digits: `999 B`, `1.23 MB`, `25.3 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB" if count < 999.5 else f"{count:,.0f} TB"


def table_line(count: int) -> str:
    """Return the line of a bill for `count` bytes of encrypted token tables."""
    return f"table, once: {human_bytes(count)}, which a client keeps for all texts"
