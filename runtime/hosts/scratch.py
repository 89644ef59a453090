"""A private folder for one run that goes away however the run ends, killed launchers included."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_REMOVE = """
import shutil, sys, time
sys.stdin.buffer.read()
for _ in range(50):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    time.sleep(0.1)
"""
"""What the watch runs once its standard input closes; parties that are still ending may write for a moment longer."""


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield the path of a new folder, mode 0700, which is removed afterwards.

    A process of its own watches from before the folder exists and removes it when this process is gone, even if it was
    killed before it started any other.
    """
    folder = Path(tempfile.gettempdir()) / f"aero-compile-{secrets.token_hex(8)}"
    watch = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _REMOVE, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what ends the launcher's group must not end the watch
    )
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        watch.kill()
        watch.communicate()
