"""Show what runs and for how long: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_BAR = 24


class Progress:
    """Counts steps of a run; all output goes to `stream` (standard error), so that results stay clean.

    On a terminal the line shows a bar, the step under way and its seconds, twice a second. Elsewhere (a log,
    a pipe) each step prints one line when it starts and one when it ends.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.total, self.done = total, 0
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._begin = time.monotonic()

    def _bar(self) -> str:
        full = _BAR * self.done // max(1, self.total)
        return f"[{'█' * full}{'·' * (_BAR - full)}] {self.done}/{self.total}"

    def say(self, text: str) -> None:
        """Print a line that stays."""
        print(f"\r\033[K{text}" if self._live else text, file=self._stream, flush=True)

    @contextmanager
    def step(self, what: str, live: bool = True) -> Iterator[None]:
        """Show `what` while the body runs; counts the step when it ends without an exception.

        `live=False` prints a plain line instead, for work that has a moving line of its own.
        """
        live = live and self._live
        begin, stop = time.monotonic(), threading.Event()

        def tick() -> None:
            while not stop.wait(0.5):
                seconds = time.monotonic() - begin
                print(f"\r\033[K{self._bar()} {what} … {seconds:.0f} s", end="", file=self._stream, flush=True)

        if not live:
            self.say(f"{self._bar()} {what} …")
        ticker = threading.Thread(target=tick, daemon=True)
        if live:
            ticker.start()
        try:
            yield
        finally:
            stop.set()
            if live:
                ticker.join()
                print("\r\033[K", end="", file=self._stream, flush=True)
        self.ended(what, time.monotonic() - begin)

    def ended(self, what: str, seconds: float) -> None:
        """Count a step that is over and took `seconds`."""
        self.done += 1
        sofar = time.monotonic() - self._begin
        self.say(f"{self._bar()} {what}: {seconds:.1f} s (of {sofar:.0f} s so far)")
