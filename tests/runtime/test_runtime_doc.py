"""The snippets of docs/runtime.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path


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
