"""One line on standard error that says which operator runs, how many are left, and how long it took."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """`shown=None` shows the line only on a terminal."""

    def __init__(self, shown: bool | None) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = self._terminal if shown is None else shown
        self._started = time.monotonic()
        self._run, self._steps, self._width = 0, 0, 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown and self._terminal:
            print("\r" + " " * self._width + "\r", end="", file=sys.stderr, flush=True)

    def event(self, role: str, event: dict[str, Any]) -> None:
        """Show an event of the client (both parties run the same steps)."""
        if role != "client":
            return
        if event["event"] == "run":
            self._run, self._steps = int(event["number"]) + 1, int(event["steps"])
        elif event["event"] == "step":
            where = f"{event['at'] + 1}/{self._steps} {event['label']} ({event['place']})"
            self.say(f"forward {self._run}: {where}")

    def say(self, text: str) -> None:
        """Show `text` with the seconds since the start."""
        if not self._shown:
            return
        line = f"private inference: {time.monotonic() - self._started:5.0f} s  {text}"[:118]
        if self._terminal:
            print("\r" + line.ljust(self._width), end="", file=sys.stderr, flush=True)
            self._width = len(line)
        else:
            print(line, file=sys.stderr, flush=True)
