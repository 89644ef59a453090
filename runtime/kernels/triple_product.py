"""A product of two secret matrices, of which all secret work was done before the tokens were known: a matrix triple.

Before, the parties draw shares of A and B uniformly modulo 2^64, in the shapes of X and Y, and compute shares of
C = A·B of integers modulo 2^64 (`aero_compile.runtime.offline`). Now each sends its shares of X - A and Y - B, 8 bytes
a value, and both know E = X - A and F = Y - B. Then, with party i's shares A_i, B_i, C_i,

    C_0 + E·(B_0 + F) + A_0·F    at the server    and    C_1 + E·B_1 + A_1·F    at the client

are shares of X·Y, exact modulo 2^64. A and B are uniform and used once, so E and F are uniform whatever X and Y are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from aero_compile.runtime.kernels.kernel import Kernel, Preparation, RandomWords, Result, Shape
from aero_compile.runtime.kernels.ring_products import ring_product
from aero_compile.runtime.kernels.words import Words
from aero_compile.runtime.roles import SERVER

if TYPE_CHECKING:
    from aero_compile.runtime.costs.session import Session
    from aero_compile.runtime.kernels.side import Side


@dataclass(frozen=True)
class TripleProduct(Kernel):
    """The kernel: x [..., rows, inner] times y [..., inner, columns] of equal leading sizes.

    The result has twice the fraction bits, as that of `PreparedProduct`.
    """

    rows: int
    inner: int
    columns: int

    def check(self) -> None:
        if not all(type(each) is int and each > 0 for each in (self.rows, self.inner, self.columns)):
            raise ValueError("the options of TripleProduct are whole numbers, at least 1")

    def results(self, *shapes: Shape) -> tuple[Result, ...]:
        sizes = ((self.rows, self.inner), (self.inner, self.columns))
        if len(shapes) != 2 or shapes[0][-2:] != sizes[0] or shapes[1] != (*shapes[0][:-2], *sizes[1]):
            raise ValueError(f"TripleProduct takes matrices of the sizes {sizes[0]} and {sizes[1]}, not {shapes}")
        return (Result((*shapes[0][:-1], self.columns)),)

    def preparation(self, *shapes: Shape) -> Preparation:
        from aero_compile.runtime.arithmetic.matrix_products import batched_product

        (result,) = self.results(*shapes)
        randoms = (RandomWords("left", shapes[0], None), RandomWords("right", shapes[1], None))
        return Preparation(randoms, (), result.shape, batched_product)

    def run(self, side: Side, *shares: Words) -> tuple[Words, ...]:
        kept, size = side.prepared, shares[0].size
        mine = np.concatenate([shares[0] - kept["left"], shares[1] - kept["right"]])
        side.send(mine)
        both = mine + side.receive(mine.shape)
        (e, f), (a, b) = self._matrices(both[:size], both[size:]), self._matrices(kept["left"], kept["right"])
        found = ring_product(e, b + f if side.rank == SERVER else b) + ring_product(a, f)
        return (kept["product"] + found.ravel(),)

    def together(self, draw: np.random.Generator, *words: Words) -> tuple[Words, ...]:
        return (ring_product(*self._matrices(*words)).ravel(),)

    def _matrices(self, left: Words, right: Words) -> tuple[Words, Words]:
        return left.reshape(-1, self.rows, self.inner), right.reshape(-1, self.inner, self.columns)

    def plain(self, *arguments: Any) -> tuple[Any, ...]:
        x, y = arguments
        return (x @ y,)

    def work(self, *shapes: Shape) -> tuple[int, int]:
        (result,) = self.results(*shapes)
        return super().work(*shapes)[0], 2 * math.prod(result.shape) * self.inner

    def bill(self, session: Session, *shapes: Shape) -> None:
        session.swap(8.0 * sum(map(math.prod, shapes)))
        session.kernel(type(self).__name__, *self.work(*shapes))
