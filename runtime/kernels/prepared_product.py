"""A product with a matrix of the server, of which all secret work was done before the tokens were known.

Before, the client draws R uniformly modulo 2^64, in the shape of X, and both parties compute shares P_0 + P_1 = R·W of
integers modulo 2^64 (`aero_compile.runtime.offline`). Now they hold X in shares X_0 + X_1. The client sends X_1 - R, 8
bytes a value, and the server adds its own: it has X - R. Then

    (X - R)·W + P_0    at the server    and    P_1    at the client

are shares of X·W, exact modulo 2^64: the numbers that SPU's own product has before it truncates them. R is uniform and
used once, so X - R is uniform whatever X is, and the server learns nothing; the client receives nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from aero_compile.runtime.kernels.kernel import Kernel, Preparation, RandomWords, Result, Shape
from aero_compile.runtime.kernels.ring_products import ring_product
from aero_compile.runtime.kernels.words import Words
from aero_compile.runtime.roles import CLIENT

if TYPE_CHECKING:
    from aero_compile.runtime.costs.session import Session
    from aero_compile.runtime.kernels.side import Side


@dataclass(frozen=True)
class PreparedProduct(Kernel):
    """The kernel: x [..., inner] times the server's w [inner, columns], or [columns, inner] if `transposed`.

    The result has twice the fraction bits: it is x·w·2^fraction_bits (`aero_compile.runtime.operators.prepared`
    truncates it).
    """

    of_server: ClassVar[frozenset[int]] = frozenset({1})
    as_integers: ClassVar[frozenset[int]] = of_server

    inner: int
    transposed: bool

    def check(self) -> None:
        if type(self.inner) is not int or self.inner < 1 or type(self.transposed) is not bool:
            raise ValueError("the options of PreparedProduct are a whole number, at least 1, and a bool")

    def results(self, *shapes: Shape) -> tuple[Result, ...]:
        if len(shapes) != 2 or not shapes[0] or shapes[0][-1] != self.inner:
            raise ValueError(f"PreparedProduct takes rows of {self.inner} values and a matrix, not {shapes}")
        if len(shapes[1]) != 2 or shapes[1][self.transposed] != self.inner:
            raise ValueError(f"PreparedProduct takes a matrix for rows of {self.inner} values, not {shapes[1]}")
        return (Result((*shapes[0][:-1], shapes[1][not self.transposed])),)

    def preparation(self, *shapes: Shape) -> Preparation:
        from aero_compile.runtime.arithmetic.matrix_products import matrix_product

        (result,), rows = self.results(*shapes), math.prod(shapes[0][:-1])

        def product(random: Any, weight: Any) -> Any:
            return matrix_product(random, weight.T if self.transposed else weight)

        size = (rows, result.shape[-1])
        return Preparation((RandomWords("random", (rows, self.inner), CLIENT),), (1,), size, product)

    def run(self, side: Side, *shares: Words) -> tuple[Words, ...]:
        x, prepared = shares[0].reshape(-1, self.inner), side.prepared
        if side.rank == CLIENT:
            side.send(x - prepared["random"].reshape(x.shape))
            return (prepared["product"],)
        found = ring_product(x + side.receive(x.shape), self._matrix(shares[1]))
        return (prepared["product"] + found.ravel(),)

    def together(self, draw: np.random.Generator, *words: Words) -> tuple[Words, ...]:
        return (ring_product(words[0].reshape(-1, self.inner), self._matrix(words[1])).ravel(),)

    def _matrix(self, words: Words) -> Words:
        return words.reshape(-1, self.inner).T if self.transposed else words.reshape(self.inner, -1)

    def plain(self, *arguments: Any) -> tuple[Any, ...]:
        x, weight = arguments
        return (x @ (weight.T if self.transposed else weight),)

    def work(self, *shapes: Shape) -> tuple[int, int]:
        (result,) = self.results(*shapes)
        return super().work(*shapes)[0], math.prod(result.shape) * self.inner

    def bill(self, session: Session, *shapes: Shape) -> None:
        session.send(CLIENT, 8.0 * math.prod(shapes[0]))
        session.kernel(type(self).__name__, *self.work(*shapes))
