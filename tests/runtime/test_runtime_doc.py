"""The error table of docs/runtime.md is the one that the code computes."""

from __future__ import annotations

from pathlib import Path

from aero_compile.runtime.approximations import approximations


def rows() -> list[str]:
    """The table's rows as they must stand in the document."""
    found = []
    for each in approximations().values():
        low, high = each.domain
        exact = "measured only" if each.formula_error is None else f"{each.formula_error:.1e}"
        found.append(
            f"| `{each.name}` | {each.method} | [{low:g}, {high:g}] | {exact} | {each.fixed_point_error:.0e} |"
        )
    return found


def test_every_approximation_is_documented_with_its_errors(root: Path) -> None:
    text = (root / "docs" / "runtime.md").read_text(encoding="utf-8")
    for row in rows():
        assert row in text
