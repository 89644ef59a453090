"""Kernels and their calls in JAX functions: work of each party on the words of its shares, alone or in an exchange.

An operator calls a kernel like any function. In plain JAX a call computes the value that the parties' results share;
SPU cannot run it, so a function is cut in pieces at its calls before it is compiled
(`runtime.lowering.split_at_kernels`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from aero_compile.runtime.kernels.share_words import Words
from aero_compile.runtime.roles import CLIENT, SERVER

if TYPE_CHECKING:
    from aero_compile.runtime.costs.building_blocks import Session
    from aero_compile.runtime.kernels.side import Side


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """One result of a kernel: its shape, "float32" or "int32" (words are an additive share) or "bool" (they are XORed).

    `owner`: the rank of the party that knows it; None: nobody does.
    """

    shape: Shape
    dtype: str = "float32"
    owner: int | None = None


@dataclass(frozen=True)
class RandomWords:
    """Words that are drawn uniformly modulo 2^64 for one run: by the party `owner`, or None: a share by each.

    `taken`: they are those of this name that were drawn for the kernel which made the argument of this number.
    """

    name: str
    shape: Shape
    owner: int | None
    taken: int | None = None


@dataclass(frozen=True)
class Preparation:
    """What a run needs that does not depend on its tokens: random words, and one product of them in shares.

    `product` is a JAX function of integers: of the `randoms`, then of the arguments with the numbers `weights`, which
    are inputs of the server. It gives the shape `gives`, and what both hold of it is named "product".
    """

    randoms: tuple[RandomWords, ...]
    weights: tuple[int, ...]
    gives: Shape
    product: Callable[..., Any]


Factors = Callable[[Mapping[str, Words]], tuple[Words, ...]]


@dataclass(frozen=True)
class ElementTriples:
    """What a kernel takes of the products of random words before its arguments are known, under the name "product".

    SPU multiplies elements in ciphertexts of 8192 values, of which a call fills whole ones. So the parties concatenate
    the factors of all kernels of a program and multiply them together (`aero_compile.runtime.offline.elements`). Two
    shares of a product of two shares need two ciphertexts and an answer (221 bytes an element); where each party knows
    one factor alone, one ciphertext and an answer (143). The square of a mask a = a_0 + a_1 is of the second kind:
    a² = a_0² + a_1² + 2·a_0·a_1, of which each party knows one of the first two terms.

    `factors`: from a party's random words by name its words of the factors, uint64 [size] each. `crossed`: there is one
    of each party, which the other does not know; else shares of both factors.
    """

    randoms: tuple[RandomWords, ...]
    size: int
    crossed: bool
    factors: Factors


class Kernel(ABC):
    """A kernel with its options; frozen dataclasses, so that equal ones are equal.

    Arguments are secret numbers, fixed-point ones where `takes` does not say another type. The program's digest covers
    kernels and options, not what they do: parties of one version of the package run the same.
    """

    @abstractmethod
    def check(self) -> None:
        """Check the options, which may be somebody else's.

        Raises:
            ValueError: they are out of range.
        """

    opens: ClassVar[int | None] = None
    """Number of the result that is an argument less the words called "mask", known to both parties; None: there is no
    such result. Other kernels take it for that argument, as long as SPU computed nothing with it."""

    unread: ClassVar[frozenset[int]] = frozenset()
    """Numbers of the arguments of which a run needs no words, and is given none."""

    of_server: ClassVar[frozenset[int]] = frozenset()
    """Numbers of the arguments that are weights of the server, of which it needs its own words, and the client none."""

    as_integers: ClassVar[frozenset[int]] = frozenset()
    """Numbers of those among them that are given as `Integers`, which may be of 32 bits."""

    for_text: ClassVar[bool] = False
    """True if what is prepared serves all runs of a text, not one."""

    billed_as: ClassVar[str] = ""
    """Name of the kernel whose measured seconds a run takes; "": of its own."""

    def takes(self, count: int) -> tuple[str, ...]:
        """The types of so many arguments, "float32" or "int32"."""
        return ("float32",) * count

    @abstractmethod
    def results(self, *shapes: Shape) -> tuple[Result, ...]:
        """What it gives for arguments of these shapes.

        Raises:
            ValueError: it does not take so many, or such ones.
        """

    @abstractmethod
    def run(self, side: Side, *shares: Words) -> tuple[Words, ...]:
        """What this party holds of each result, from its share of each argument: uint64 [elements]."""

    @abstractmethod
    def together(self, draw: np.random.Generator, *words: Words) -> tuple[Words, ...]:
        """The words of the results for those of the arguments themselves, for a rehearsal; as the parties' shares
        would come to, what they lose by a wrap included. `draw`: for what they draw."""

    @abstractmethod
    def plain(self, *arguments: Any) -> tuple[Any, ...]:
        """The results as JAX arrays, for arguments in the clear."""

    def preparation(self, *shapes: Shape) -> Preparation | None:
        """What is made before a run on arguments of these shapes; None: nothing.

        Raises:
            ValueError: it does not take such arguments.
        """
        return None

    def triples(self, *shapes: Shape) -> ElementTriples | None:
        """Products of random words that are made before a run on arguments of these shapes, together with those of
        other kernels; None: there are none. A kernel has these or a `preparation`, not both.

        Raises:
            ValueError: it does not take such arguments.
        """
        return None

    def correlations(self, *shapes: Shape) -> dict[str, int]:
        """Count the elements of each kind of correlated randomness (`aero_compile.runtime.offline.correlations`) that a
        run takes, by the names of the kinds.

        Raises:
            ValueError: it does not take such arguments.
        """
        return {}

    def options_of_text(self) -> tuple[Any, ...]:
        """Options that, beside the shapes of what is drawn, decide what is prepared for a text."""
        return ()

    def set_up(self) -> tuple[Shape, ...]:
        """Shapes of arguments on which a run exchanges what is exchanged once; none where there is no such thing."""
        return ()

    def work(self, *shapes: Shape) -> tuple[int, int]:
        """How many words of arguments and results a party handles in a run, and how many multiplications of matrix
        products modulo 2^64 it makes: what its seconds follow from."""
        found = self.results(*shapes)
        return sum(map(math.prod, (*shapes, *(each.shape for each in found)))), 0

    @abstractmethod
    def bill(self, session: Session, *shapes: Shape) -> None:
        """Bill a run on arguments of these shapes: what is exchanged, and the party's own work (`Session.kernel`)."""


class LocalKernel(Kernel):
    """A kernel of one argument, computed without a message."""

    @abstractmethod
    def of_share(self, rank: int, share: Words) -> tuple[Words, ...]:
        """What party `rank` holds of each result, from its `share` of the argument."""

    def run(self, side: Side, *shares: Words) -> tuple[Words, ...]:
        (share,) = shares
        return self.of_share(side.rank, share)

    def together(self, draw: np.random.Generator, *words: Words) -> tuple[Words, ...]:
        """Cut the value in two shares at random, let both parties compute, and add up what they get."""
        (whole,) = words
        theirs = draw.integers(2**64, size=whole.shape, dtype=np.uint64)
        both = zip(self.of_share(SERVER, whole - theirs), self.of_share(CLIENT, theirs), strict=True)
        return tuple(server + client for server, client in both)

    def bill(self, session: Session, *shapes: Shape) -> None:
        session.kernel(type(self).__name__, *self.work(*shapes))


def call_kernel(kernel: Kernel, *arguments: Any) -> tuple[Any, ...]:
    """Call a kernel on JAX arrays of floats; `Kernel.results` tells what it gives."""
    return tuple(primitive().bind(*arguments, kernel=kernel))


@cache
def primitive() -> Any:
    """The call as a JAX primitive: it has a value and a shape, but no translation, so that none is ever compiled."""
    from jax import core

    found: Any = core.Primitive("share_kernel")
    shaped: Any = core.ShapedArray
    found.multiple_results = True
    found.def_impl(lambda *arguments, kernel: list(kernel.plain(*arguments)))
    found.def_abstract_eval(
        lambda *arguments, kernel: [
            shaped(each.shape, np.dtype(each.dtype)) for each in kernel.results(*(one.shape for one in arguments))
        ]
    )
    return found
