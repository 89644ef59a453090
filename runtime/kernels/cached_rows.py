"""Numbers of the masking rows of a text: which row hides which cached position, and how many are left.

Both parties, and the cost model, follow them from public positions alone: where a program runs, and how many of its
positions are the text's. Numbers only grow. A position that is computed anew takes a fresh number, so that no row of
masks ever hides two values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aero_compile.errors import PartyError
from aero_compile.runtime.kernels.share_words import Words

Indices = npt.NDArray[np.int64]


@dataclass
class RowNumbers:
    """Masking rows of one cached product of a text, of `capacity` rows.

    `rows` are the numbers of the positions that are masked, ascending; `used`: how many numbers were given out.
    `position` and `kept` are of the run at hand: it computes the positions from `position` on, of which so many are the
    text's.
    """

    capacity: int
    rows: list[int] = field(default_factory=list)
    used: int = 0
    position: int = 0
    kept: int = 0

    def begin(self, position: int, kept: int) -> None:
        """Begin a run: it computes `kept` positions from `position` on anew, and nothing after them is held."""
        self.rows = self.rows[:position]
        self.position, self.kept = position, kept

    @property
    def end(self) -> int:
        """Positions that are held once the run at hand has computed its own."""
        return self.position + self.kept

    @property
    def is_enough(self) -> bool:
        """True if there are fresh rows for all positions that the run at hand has to mask."""
        return self.used + self.end - len(self.rows) <= self.capacity

    def take(self) -> tuple[Indices, int]:
        """Give fresh rows to all positions that are not masked, those of the run at hand among them.

        Returns:
            The numbers of all positions [end], and the first position that was not masked before.

        Raises:
            PartyError: there are too few, or the run at hand took its rows before.
        """
        first = len(self.rows)
        if self.kept < 1 or first > self.position or not self.is_enough:
            raise PartyError(
                f"a product with cached rows finds {self.capacity - self.used} fresh masks for positions {first} to "
                f"{self.end}, and each hides one value once"
            )
        count = self.end - first
        self.rows = [*self.rows, *range(self.used, self.used + count)]
        self.used += count
        return np.array(self.rows, np.int64), first


@dataclass
class CachedRows:
    """A party's part of one cached product of a text: its shares of masks and products, and the rows that are open.

    `prepared`: as `CachedProduct.preparation` says. `opened`: cached rows less their masks, by number; zeros where none
    was opened.
    """

    numbers: RowNumbers
    prepared: Mapping[str, Words]
    opened: Words = field(init=False)

    def __post_init__(self) -> None:
        self.opened = np.zeros_like(self.prepared["right"])
