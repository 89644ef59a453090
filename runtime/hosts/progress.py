"""One line on standard error that says which operator runs, how many are left, and how long it took."""

from __future__ import annotations

import time
from typing import Any

from aero_compile.console import Line


class RunProgress(Line):
    """`shown=None` shows the line only on a terminal."""

    def __init__(self, shown: bool | None) -> None:
        super().__init__()
        self._shown = self.live if shown is None else shown
        self._started = time.monotonic()
        self._run, self._steps = 0, 0

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown:
            self.clear()

    def event(self, role: str, event: dict[str, Any]) -> None:
        """Show an event of the client (both parties run the same steps)."""
        if role != "client":
            return
        if event["event"] == "run":
            self._run, self._steps = int(event["number"]) + 1, int(event["steps"])
        elif event["event"] == "step":
            where = f"{event['at'] + 1}/{self._steps} {event['label']} ({event['place']})"
            self.doing(f"forward {self._run}: {where}")
        elif event["event"] == "batch":
            self.doing(f"products by the batch: {event['done']:,}/{event['of']:,} columns of {event['matrix']}")

    def doing(self, what: str) -> None:
        """Show `what` with the seconds since the start."""
        if self._shown:
            self.show(f"private inference: {time.monotonic() - self._started:5.0f} s  {what}"[:118])
