"""Scheduler of computations: a few at once, the others wait, clients one after the other."""

from __future__ import annotations

import asyncio
from itertools import count, zip_longest

from aero_compile.errors import PartyError


class Busy(PartyError):
    """As many wait already as may."""


class Turn:
    """One computation that waits or runs."""

    def __init__(self, client: str, number: int) -> None:
        self.client, self.number = client, number
        self.before: int | None = None
        """How many come first; None once it is told to run."""
        self.changed = asyncio.Event()

    async def moved(self) -> int | None:
        """Wait for the next change of `before` and return it: how many come first, or None when it is its turn."""
        await self.changed.wait()
        self.changed.clear()
        return self.before


class Turns:
    """At most `at_once` run and `longest` wait. Clients take turns: who was served least lately is next.

    A client with several sessions gets no more turns than one with one.
    """

    def __init__(self, at_once: int, longest: int) -> None:
        self.at_once, self.longest = at_once, longest
        self.running: set[Turn] = set()
        self.waiting: list[Turn] = []
        self._numbers = count(1)
        self._served: dict[str, int] = {}

    @property
    def has_place(self) -> bool:
        """Whether a computation could run at once."""
        return not self.waiting and len(self.running) < self.at_once

    def join(self, client: str) -> Turn:
        """Get in line.

        Raises:
            Busy: the line is full.
        """
        if len(self.waiting) >= self.longest and len(self.running) >= self.at_once:
            raise Busy(f"{len(self.running)} computations run and {len(self.waiting)} wait, and no more may; try later")
        turn = Turn(client, next(self._numbers))
        self.waiting.append(turn)
        self._move_up()
        return turn

    def leave(self, turn: Turn) -> None:
        """Give up a turn, whether it runs or waits."""
        self.running.discard(turn)
        if turn in self.waiting:
            self.waiting.remove(turn)
        self._move_up()

    def _move_up(self) -> None:
        while self.waiting and len(self.running) < self.at_once:
            first = self._order()[0]
            self.waiting.remove(first)
            self.running.add(first)
            self._served[first.client] = next(self._numbers)
            first.before = None
            first.changed.set()
        waits = {turn.client for turn in (*self.waiting, *self.running)}
        if not waits:
            self._served.clear()  # no client has to come before another
        for place, turn in enumerate(self._order()):
            if turn.before != (before := place + len(self.running)):
                turn.before = before
                turn.changed.set()

    def _order(self) -> list[Turn]:
        """Who waits, in the order in which they will run: one of each client, then the second of each, and so on."""
        lines: dict[str, list[Turn]] = {}
        for turn in self.waiting:
            lines.setdefault(turn.client, []).append(turn)
        clients = sorted(lines, key=lambda client: (self._served.get(client, 0), lines[client][0].number))
        rounds = zip_longest(*(lines[client] for client in clients))
        return [turn for each in rounds for turn in each if turn is not None]
