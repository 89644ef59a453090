"""Show what runs and for how long: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_BAR = 24


class Line:
    """A line that is written over on a terminal; all output goes to `stream` (standard error)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self.live = self._stream.isatty()

    def show(self, text: str) -> None:
        """Write over what was shown before; without a terminal each text is a line."""
        self._print(text, end="" if self.live else "\n")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._print(text)

    def _print(self, text: str, end: str = "\n") -> None:
        """Print; a stream that nobody reads any more must not end the work that it tells of."""
        with contextlib.suppress(OSError):
            print(f"\r\033[K{text}" if self.live else text, end=end, file=self._stream, flush=True)

    def clear(self) -> None:
        """Take away what was shown."""
        if self.live:
            self.show("")


def bar(done: int, total: int) -> str:
    """Return how many steps of `total` are done, as a bar and in numbers."""
    full = _BAR * done // max(1, total)
    return f"[{'█' * full}{'·' * (_BAR - full)}] {done}/{total}"


class Progress(Line):
    """Counts steps of a run.

    On a terminal the line shows a bar, the step under way and its seconds, twice a second. Elsewhere (a log,
    a pipe) each step prints one line when it starts and one when it ends.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self.total, self.done = total, 0
        self._begin = time.monotonic()

    def _bar(self) -> str:
        return bar(self.done, self.total)

    @contextmanager
    def step(self, what: str, live: bool = True) -> Iterator[None]:
        """Show `what` while the body runs; counts the step when it ends without an exception.

        `live=False` prints a plain line instead, for work that has a moving line of its own.
        """
        live = live and self.live
        begin, stop = time.monotonic(), threading.Event()

        def tick() -> None:
            while not stop.wait(0.5):
                seconds = time.monotonic() - begin
                self.show(f"{self._bar()} {what} … {seconds:.0f} s")

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
                self.clear()
        self.ended(what, time.monotonic() - begin)

    def ended(self, what: str, seconds: float) -> None:
        """Count a step that is over and took `seconds`."""
        self.done += 1
        sofar = time.monotonic() - self._begin
        self.say(f"{self._bar()} {what}: {seconds:.1f} s (of {sofar:.0f} s so far)")
