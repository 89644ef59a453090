"""Products of elements of two secrets, of which all secret work was done before the tokens were known.

As in `triple_product`, with C = A∘B: each sends its shares of E = X - A and F = Y - B, and has its share of X∘Y from C,
E∘B, A∘F and E∘F. One number of Y stands for a row of X. Where one party knows all of X and the other all of Y, as the
factors of an exponential, each draws the words of its own alone and sends those alone: 16 bytes for a product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aero_compile.runtime.kernels.kernel import ElementTriples, Kernel, Preparation, RandomWords, Result, Shape
from aero_compile.runtime.kernels.words import Words
from aero_compile.runtime.roles import CLIENT, SERVER

if TYPE_CHECKING:
    from aero_compile.runtime.costs.session import Session
    from aero_compile.runtime.kernels.side import Side


@dataclass(frozen=True)
class TripleElements(Kernel):
    """The kernel: rows of x [rows, width] times one number of y [rows] each; the result has twice the fraction bits.

    `owned`: the server's share of x and the client's share of y are all of them, and their other shares are zeros.
    """

    owned: bool
    width: int = 1

    def check(self) -> None:
        if type(self.owned) is not bool or type(self.width) is not int or self.width < 1:
            raise ValueError("the options of TripleElements are a bool and a whole number, at least 1")
        if self.owned and self.width != 1:
            raise ValueError("TripleElements takes rows of one element where each party knows one factor")

    def results(self, *shapes: Shape) -> tuple[Result, ...]:
        if len(shapes) != 2 or shapes[0] != (*shapes[1], self.width):
            raise ValueError(f"TripleElements takes rows of {self.width} and a number for each, not {shapes}")
        return (Result(shapes[0]),)

    def preparation(self, *shapes: Shape) -> Preparation | None:
        from aero_compile.runtime.arithmetic.row_products import products_of_rows

        self.results(*shapes)
        owners = (SERVER, CLIENT) if self.owned else (None, None)
        randoms = (RandomWords("left", shapes[0], owners[0]), RandomWords("right", shapes[1], owners[1]))
        return Preparation(randoms, (), shapes[0], products_of_rows)

    def run(self, side: Side, *shares: Words) -> tuple[Words, ...]:
        kept, (x, y) = side.prepared, shares
        a, b = kept.get("left", np.zeros_like(x)), kept.get("right", np.zeros_like(y))
        if self.owned:
            mine = x - a if side.rank == SERVER else y - b
            side.send(mine)
            theirs = side.receive(mine.shape)
            e, f = (mine, theirs) if side.rank == SERVER else (theirs, mine)
        else:
            mine = np.concatenate([x - a, y - b])
            side.send(mine)
            e, f = np.split(mine + side.receive(mine.shape), [x.size])
        return (kept["product"] + self._rows(e, b + f if side.rank == SERVER else b) + self._rows(a, f),)

    def together(self, draw: np.random.Generator, *words: Words) -> tuple[Words, ...]:
        return (self._rows(words[0].ravel(), words[1].ravel()),)

    def _rows(self, x: Words, y: Words) -> Words:
        return (x.reshape(-1, self.width) * y[:, None]).ravel()

    def plain(self, *arguments: Any) -> tuple[Any, ...]:
        x, y = arguments
        return (x * y[..., None],)

    def bill(self, session: Session, *shapes: Shape) -> None:
        size = math.prod(shapes[0])
        session.swap(8.0 * size if self.owned else 8.0 * (size + math.prod(shapes[1])))
        session.kernel(type(self).__name__, *self.work(*shapes))


@dataclass(frozen=True)
class BatchedElements(TripleElements):
    """`TripleElements` whose preparation is one of elements, made together with those of other kernels."""

    def preparation(self, *shapes: Shape) -> None:
        return None

    def triples(self, *shapes: Shape) -> ElementTriples:
        self.results(*shapes)
        owners = (SERVER, CLIENT) if self.owned else (None, None)
        randoms = (RandomWords("left", shapes[0], owners[0]), RandomWords("right", shapes[1], owners[1]))
        return ElementTriples(randoms, math.prod(shapes[0]), self.owned, self._factors)

    def _factors(self, kept: Mapping[str, Words]) -> tuple[Words, ...]:
        if self.owned:
            return (kept["left"] if "left" in kept else kept["right"],)
        return kept["left"], np.repeat(kept["right"], self.width)
