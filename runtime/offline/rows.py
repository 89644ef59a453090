"""Rows of R and of a party's share of R·W that a batch left, for one matrix W of the server: each is used once.

They lie in files without a name, in a private folder, which end with the process. Rows that were given are overwritten,
though what the disk has of them is not wiped for sure.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from aero_compile.errors import PartyError
from aero_compile.runtime.kernels.column_encryption import ROWS
from aero_compile.runtime.kernels.share_words import Words

MOST_ROWS = 1 << 18
"""Rows of one matrix that may be there at once."""

Row = dict[str, Words]
"""Rows [count, width] by name: "random", of the client alone, and "product"."""


def empty_rows(folder: Path, widths: dict[str, int]) -> Row:
    """Arrays on disk for the rows of one batch, [N, width] each; 8·N bytes a column.

    Raises:
        PartyError: the disk has no room for them, which is taken here: a page without it would end the process later.
    """
    found: Row = {}
    for name, width in widths.items():
        with tempfile.TemporaryFile(dir=folder) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, 8 * ROWS * width)
            except OSError as error:
                wanted = f"{8 * ROWS * width:,} bytes of a batch's rows"
                raise PartyError(f"{folder} has no room for {wanted} ({error.strerror}); prepare less") from error
            found[name] = np.memmap(file, np.uint64, "r+", shape=(ROWS, width))
    return found


def out_of_memory(rows: Row) -> None:
    """Let a process hold these rows in their files alone, until they are read again."""
    for array in rows.values():
        if isinstance(array.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            array.base.madvise(mmap.MADV_DONTNEED)


@dataclass
class RowPool:
    """The batches of one matrix that have rows left, the oldest first. Both parties give rows in the same order."""

    _batches: deque[Row] = field(default_factory=deque)
    _given: int = 0

    @property
    def left(self) -> int:
        """Rows that were not given."""
        return ROWS * len(self._batches) - self._given

    def add(self, batch: Row) -> None:
        """Add a batch that is complete."""
        self._batches.append(batch)

    def take(self, count: int) -> Row:
        """Give the next `count` rows, of which there must be so many `left`, and overwrite them here."""
        if count > self.left:
            raise ValueError(f"there are {self.left} rows, not {count}")
        pieces: list[Row] = []
        while count:
            start, end = self._given, min(self._given + count, ROWS)
            batch = self._batches[0]
            pieces.append({name: np.array(array[start:end]) for name, array in batch.items()})
            for array in batch.values():
                array[start:end] = 0
            out_of_memory(batch)
            count, self._given = count - (end - start), end % ROWS
            if end == ROWS:
                self._batches.popleft()
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in (pieces[0] if pieces else ())}
