"""What was on the emulated network when: the seconds of a run in three parts, and its rounds.

At each moment bytes leave in at least one direction (*sending*), or none leaves but some are under way (*waiting*), or
nothing is on the network at all (*computing*). Rounds are half the longest chain of transmissions, acknowledgements
included, each of which left only after the one before it had arrived: no run can take less time than they do. What
would have left no sooner in any case is in the chain, too, so that slow computing may lengthen it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aero_compile.runtime.hosts import relay

Times = npt.NDArray[np.float64]


class Traffic:
    """The log of a relay: `begin` and `end` of what left, in seconds, and its `chain`; it arrives `delay` later."""

    def __init__(self, begin: Times, end: Times, chain: npt.NDArray[np.int64], delay: float) -> None:
        order = np.argsort(end, kind="stable")
        self._arrivals, self._chain = end[order] + delay, np.maximum.accumulate(chain[order])
        self._leaving, self._under_way = _Spans(begin, end), _Spans(begin, end + delay)

    @classmethod
    def read(cls, log: Path, delay: float) -> Traffic:
        """Read the file that a relay wrote; messages arrive `delay` seconds after they left."""
        kind = np.dtype([("direction", "<i4"), ("chain", "<i4"), ("begin", "<f8"), ("end", "<f8")])
        assert kind.itemsize == relay.RECORD.size
        content = log.read_bytes()
        found = np.frombuffer(content[: len(content) // kind.itemsize * kind.itemsize], kind)
        return cls(found["begin"], found["end"], found["chain"].astype(np.int64), delay)

    def between(self, times: Sequence[float]) -> list[dict[str, Any]]:
        """`rounds`, and the seconds `sending` and `waiting`, from each of these times to the next one."""
        at = np.asarray(times)
        leaving, under_way = self._leaving.until(at), self._under_way.until(at)
        arrived = np.searchsorted(self._arrivals, at, side="right")
        chain = np.concatenate([[0], self._chain])[arrived]
        columns = {"rounds": chain / 2, "sending": leaving, "waiting": under_way - leaving}
        steps = {name: np.diff(column).tolist() for name, column in columns.items()}
        return [{name: column[at] for name, column in steps.items()} for at in range(len(times) - 1)]


class _Spans:
    """Spans of time that may overlap."""

    def __init__(self, begin: Times, end: Times) -> None:
        order = np.argsort(begin, kind="stable")
        begin, latest = begin[order], np.maximum.accumulate(end[order])
        first = np.concatenate([[True], begin[1:] > latest[:-1]])[: len(begin)]
        last = np.concatenate([first[1:], [True]])[: len(begin)]
        self._begin, self._end = begin[first], latest[last]
        self._before = np.concatenate([[0.0], np.cumsum(self._end - self._begin)])

    def until(self, times: Times) -> Times:
        """How long, up to each time, at least one span lasted."""
        at = np.searchsorted(self._begin, times, side="right")
        over = np.maximum(0.0, self._end[np.maximum(at - 1, 0)] - times) if len(self._begin) else np.zeros(len(times))
        return np.asarray(self._before[at] - np.where(at > 0, over, 0.0))
