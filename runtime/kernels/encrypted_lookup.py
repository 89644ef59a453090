"""Rows of a table of the server, looked up by tokens of the client in one message (see `lookup_table`).

The table is encrypted once, when the program is written, and serves every run. What comes out is a row with twice the
fraction bits, as a product with a one-hot row has them before it is truncated; the noise of the encryption is below one
unit of what truncation leaves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from aero_compile.errors import PartyError
from aero_compile.runtime.kernels.kernel import Kernel, Result, Shape
from aero_compile.runtime.kernels.lookup_table import degree_for, look_up, opened, sent_bytes
from aero_compile.runtime.kernels.ring_encryption import LARGEST_DEGREE
from aero_compile.runtime.kernels.words import Words
from aero_compile.runtime.roles import CLIENT

if TYPE_CHECKING:
    from aero_compile.runtime.costs.session import Session
    from aero_compile.runtime.kernels.side import Side


LEAST_BITS = 18
"""Of the fraction: 2^18 is above the noise of rows of up to 4,096 numbers, and with it every error below one unit."""


@dataclass(frozen=True)
class EncryptedLookup(Kernel):
    """The kernel: one-hot rows of integers [..., vocabulary], which the client alone knows, look rows of the server's
    table [vocabulary, width] up. The result has twice the table's `fraction_bits`."""

    unread: ClassVar[frozenset[int]] = frozenset({1})
    of_server: ClassVar[frozenset[int]] = unread

    vocabulary: int
    width: int
    fraction_bits: int

    def check(self) -> None:
        if not all(type(each) is int and each > 0 for each in (self.vocabulary, self.width)):
            raise ValueError(f"EncryptedLookup takes a table of whole sizes, not {self.vocabulary!r} by {self.width!r}")
        if type(self.fraction_bits) is not int or not LEAST_BITS <= self.fraction_bits <= 28:
            raise ValueError(f"EncryptedLookup takes {LEAST_BITS} to 28 fraction bits, not {self.fraction_bits!r}")

    def takes(self, count: int) -> tuple[str, ...]:
        return ("int32", "float32")[:count]

    def results(self, *shapes: Shape) -> tuple[Result, ...]:
        if len(shapes) != 2 or not shapes[0] or shapes[0][-1] != self.vocabulary:
            raise ValueError(f"EncryptedLookup takes one-hot rows of {self.vocabulary} and a table, not {shapes}")
        if shapes[1] != (self.vocabulary, self.width):
            raise ValueError(f"EncryptedLookup takes a table {(self.vocabulary, self.width)}, not {shapes[1]}")
        if self.width > LARGEST_DEGREE:
            raise ValueError(f"EncryptedLookup takes rows of at most {LARGEST_DEGREE} numbers, not {self.width}")
        return (Result((*shapes[0][:-1], self.width)),)

    def run(self, side: Side, *shares: Words) -> tuple[Words, ...]:
        tokens, held = shares[0].reshape(-1, self.vocabulary), side.prepared
        if side.rank == CLIENT:
            sent, mine = look_up(held, self._places(tokens))
            side.send(sent)
            return (mine.ravel(),)
        return (opened(held, side.receive((len(tokens), degree_for(self.width) + self.width))).ravel(),)

    def together(self, draw: np.random.Generator, *words: Words) -> tuple[Words, ...]:
        tokens = words[0].reshape(-1, self.vocabulary)
        rows = words[1].reshape(self.vocabulary, -1)[self._places(tokens)]
        return (rows.ravel() << np.uint64(self.fraction_bits),)

    def _places(self, tokens: Words) -> Words:
        """Where the one of each row is."""
        rows, places = np.nonzero(tokens)
        if not np.array_equal(rows, np.arange(len(tokens))):
            raise PartyError("a lookup takes tokens that the client alone knows, as one-hot rows")
        return places.astype(np.uint64)

    def plain(self, *arguments: Any) -> tuple[Any, ...]:
        tokens, table = arguments
        return (tokens.astype(table.dtype) @ table,)

    def work(self, *shapes: Shape) -> tuple[int, int]:
        """Of words but the table's, which are not read, and of multiplications of polynomials."""
        degree = degree_for(self.width)
        return super().work(*shapes)[0] - math.prod(shapes[1]), math.prod(shapes[0][:-1]) * degree * degree.bit_length()

    def bill(self, session: Session, *shapes: Shape) -> None:
        session.send(CLIENT, float(math.prod(shapes[0][:-1]) * sent_bytes(self.width)))
        session.kernel(type(self).__name__, *self.work(*shapes))
