"""How a command ends: one place for what is printed and returned when it could not do its work."""

from __future__ import annotations

import sys
from collections.abc import Callable

from aero_compile.errors import AeroError

MISTAKE, INTERRUPTED = 2, 130


def exit_code(command: Callable[[], int], kept: str = "") -> int:
    """Run a command and return its exit code: its own, 2 for an error of ours or a file's, 130 when interrupted.

    `kept` says, after "interrupted", what is left of the work and how to go on.
    """
    try:
        return command()
    except AeroError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    except OSError as error:
        if error.filename is None:  # no file that the user named: a bug, or a network
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print(f"\ninterrupted{f'; {kept}' if kept else ''}", file=sys.stderr)
        return INTERRUPTED
