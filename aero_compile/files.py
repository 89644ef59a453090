"""Writing files so that a reader, or a crash, never meets half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from aero_compile.errors import OutputDirError


def refuse_existing(path: Path | None, overwrite: bool) -> None:
    """Raise `OutputDirError` for a file that exists, unless it may be replaced."""
    if path is not None and path.exists() and not overwrite:
        raise OutputDirError(f"{path} exists; add --overwrite to replace it")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) beside `path` and rename it into place; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        # mkstemp makes files private; a result gets what the user's umask gives any other file.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
