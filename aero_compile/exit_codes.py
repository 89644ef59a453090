"""How a command ends: one place for what is printed and returned when it could not do its work."""

from __future__ import annotations

import contextlib
import errno
import select
import sys
from collections.abc import Callable
from typing import TextIO

from aero_compile.errors import AeroError
from aero_compile.terminal import discard, open_streams

MISTAKE, INTERRUPTED, UNREAD = 2, 130, 141


def exit_code(command: Callable[[], int], kept: str = "") -> int:
    """Run a command and return its exit code: its own, 2 for an error of ours or a file's, 130 when interrupted.

    141, as of any command, if what reads its output has left (`aero-compile recipes | head`); 2 if it cannot be
    written (a full disk). Standard streams are first made fit for every character (`aero_compile.terminal`).

    `kept` says, after "interrupted", what is left of the work and how to go on; without it the interruption may say so.
    """
    open_streams()
    try:
        code = command()
        sys.stdout.flush()
        return code
    except AeroError as error:
        _say(f"error: {error}")
        return MISTAKE
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return UNREAD
        place = error.filename or ("standard output" if error.errno == errno.ENOSPC and _is_full() else None)
        if place is None:  # no file that the user named: a bug, or a network
            raise
        _say(f"error: {place}: {error.strerror}")
        return MISTAKE
    except KeyboardInterrupt as stop:
        left = kept or str(stop)
        _say(f"\ninterrupted{f'; {left}' if left else ''}")
        return INTERRUPTED


def _say(text: str) -> None:
    """Print to standard error, which may be a closed pipe: then the exit code alone tells."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _nobody_reads() -> bool:
    """True if what reads the output, or the errors, has left; then what remains to be printed there goes nowhere."""
    left = [stream for stream in (sys.stdout, sys.stderr) if _has_left(stream)]
    for stream in left:
        discard(stream)
    return bool(left)


def _has_left(stream: TextIO) -> bool:
    output = select.poll()
    output.register(stream, 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def _is_full() -> bool:
    """True if standard output takes nothing more; then what remains to be printed goes nowhere."""
    try:
        print(flush=True)
    except OSError:
        discard(sys.stdout)
        return True
    return False
