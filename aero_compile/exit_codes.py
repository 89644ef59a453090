"""How a command ends: one place for what is printed and returned when it could not do its work."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

from aero_compile.errors import AeroError

MISTAKE, INTERRUPTED, UNREAD = 2, 130, 141


def exit_code(command: Callable[[], int], kept: str = "") -> int:
    """Run a command and return its exit code: its own, 2 for an error of ours or a file's, 130 when interrupted.

    141, as of any command, if what reads its output has left (`aero-compile recipes | head`).

    `kept` says, after "interrupted", what is left of the work and how to go on; without it the interruption may say so.
    """
    try:
        code = command()
        sys.stdout.flush()
        return code
    except AeroError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return UNREAD
        if error.filename is None:  # no file that the user named: a bug, or a network
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt as stop:
        left = kept or str(stop)
        print(f"\ninterrupted{f'; {left}' if left else ''}", file=sys.stderr)
        return INTERRUPTED


def _nobody_reads() -> bool:
    """Whether what reads the output has left; then what remains to be printed goes nowhere."""
    output = select.poll()
    output.register(sys.stdout, 0)
    left = any(event & select.POLLERR for _, event in output.poll(0))
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return left
