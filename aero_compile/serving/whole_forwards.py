"""Text from a server that computes whole forwards: every token is one, of the text so far."""

from __future__ import annotations

from collections.abc import Sequence

from aero_compile.errors import InputError
from aero_compile.runtime.generation.session import Cost, Logits
from aero_compile.serving.client import Connection


class WholeForwards:
    """The decoder of a `Session` over a connection: nothing is held between tokens, so filling in costs nothing."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._text: list[int] = []
        lengths = [facts.length for facts in connection.programs if facts.positions == facts.length]
        if not lengths:
            raise InputError("the server's programs give the last position alone, and texts of other lengths are asked")
        self.vocabulary, self.room, self.set_up = connection.programs[0].vocabulary, max(lengths), Cost()

    def fill(self, ids: Sequence[int], position: int) -> Cost:
        """Remember `ids` at `position` and behind it."""
        self._text[position:] = ids
        return Cost()

    def step(self, token: int, position: int) -> tuple[Logits, Cost]:
        """The logits that follow `token` at `position`, float32 [V], by a forward of the whole text."""
        self._text[position:] = [token]
        logits: Logits = self._connection.logits(self._text)[-1]
        return logits, self._connection.last_cost or Cost()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
