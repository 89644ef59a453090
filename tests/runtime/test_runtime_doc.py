"""The error table of docs/runtime.md is the one that the code computes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from aero_compile.runtime.arithmetic.approximations import approximations
from aero_compile.runtime.arithmetic.exponential import ERRORS, ONE_PRODUCT, SoftmaxExponential


def rows() -> list[str]:
    """The table's rows as they must stand in the document."""
    found: list[str] = []
    for each in approximations().values():
        low, high = each.domain
        exact = "measured only" if each.formula_error is None else f"{each.formula_error:.1e}"
        found.append(
            f"| `{each.name}` | {each.method} | [{low:g}, {high:g}] | {exact} | {each.fixed_point_error:.0e} "
            f"| {each.bytes_per_element:,} |"
        )
    return found


def exponential_rows() -> list[str]:
    """The rows of the table of softmax exponentials."""
    forms: tuple[SoftmaxExponential, ...] = (*ONE_PRODUCT, *ERRORS)
    return [
        f"| {each.form} | {each.reach:.3g} | {'yes' if each.clamped else 'no'} | {each.error_in(128):.1e} "
        f"| {each.error_in(1024):.1e} | {each.bytes_per_element} |"
        for each in forms
    ]


def test_every_approximation_is_documented_with_its_errors(root: Path) -> None:
    text = (root / "docs" / "runtime.md").read_text(encoding="utf-8")
    for row in [*rows(), *exponential_rows()]:
        assert row in text


def test_the_snippets_name_what_one_import_provides(root: Path) -> None:
    text = (root / "docs" / "runtime.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    found = {ast.unparse(node) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)}
    names = sorted(name for name in found if name.startswith("aero_compile."))
    assert "aero_compile.runtime.export" in names
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(["import aero_compile", *names])], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
