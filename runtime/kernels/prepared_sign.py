"""x < 0 for secret elements, with masks of the offline phase: three messages by each party, masked ones alone.

`aero_compile.runtime.online.sign_layout` says how. Each opens its share of x plus its part of r, then shares of bits
plus its shares of their masks; r and the masks are used once, so all that is sent is uniform whatever x is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aero_compile.runtime.kernels.kernel import Kernel, Result, Shape
from aero_compile.runtime.kernels.words import Words
from aero_compile.runtime.online.masked_functions import parity
from aero_compile.runtime.online.sign_layout import SMALL, Join, SignLayout, digit_selectors, sign_masks
from aero_compile.runtime.roles import SERVER

if TYPE_CHECKING:
    from aero_compile.runtime.costs.session import Session
    from aero_compile.runtime.kernels.side import Side

Bits = npt.NDArray[np.bool_]
Opened = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PreparedSign(Kernel):
    """The kernel: secret bits, right for numbers whose words are in ±2^(`bits` - 1)."""

    bits: int

    def check(self) -> None:
        if type(self.bits) is not int or not SMALL <= self.bits <= 63:
            raise ValueError(f"the sign of numbers of {self.bits} bits is not taken: choose {SMALL} to 63")

    def results(self, *shapes: Shape) -> tuple[Result, ...]:
        if len(shapes) != 1:
            raise ValueError(f"PreparedSign takes one argument, not {len(shapes)}")
        return (Result(shapes[0], "bool"),)

    def correlations(self, *shapes: Shape) -> dict[str, int]:
        self.results(*shapes)
        return {sign_masks(self.bits): math.prod(shapes[0])}

    def run(self, side: Side, *shares: Words) -> tuple[Words, ...]:
        (x,), layout, kept = shares, SignLayout(self.bits), side.prepared
        mine = x + kept["numbers"]
        kind = np.uint32 if self.bits <= 32 else np.uint64
        opened = (mine + side.exchange(mine.astype(kind))) & np.uint64((1 << self.bits) - 1)
        less, equal = list[Bits](), list[Bits]()
        for digit, monomials in zip(layout.digits, kept["digits"], strict=True):
            value = (opened >> np.uint64(digit[0]) & np.uint64(2 ** len(digit) - 1)).astype(np.int64)
            is_less, is_equal = digit_selectors(len(digit))
            less.append(parity(monomials & is_less[value]))
            equal.append(parity(monomials & is_equal[value]))
        masks, joins = kept["masks"], kept["joins"]
        for each in layout.rounds:
            less, equal = _joined(side, each, less, equal, masks, joins)
            used = sum(join.monomials.variables for join in each)
            masks, joins = masks[used:], joins[len(each) :]
        result = less[0] ^ kept["highest"]
        if side.rank == SERVER:
            result = result ^ (opened >> np.uint64(self.bits - 1)).astype(np.bool_)
        return (result.astype(np.uint64),)

    def together(self, draw: np.random.Generator, *words: Words) -> tuple[Words, ...]:
        (whole,) = words
        return (whole >> np.uint64(self.bits - 1) & np.uint64(1),)

    def plain(self, *arguments: Any) -> tuple[Any, ...]:
        (x,) = arguments
        return (x < 0,)

    def bill(self, session: Session, *shapes: Shape) -> None:
        n = math.prod(shapes[0])
        session.kernel(type(self).__name__, *self.work(*shapes))
        session.swap(n * (4.0 if self.bits <= 32 else 8.0))
        for joins in SignLayout(self.bits).rounds:
            session.swap(-(-n * sum(join.monomials.variables for join in joins) // 8))


def _joined(
    side: Side, joins: tuple[Join, ...], less: list[Bits], equal: list[Bits], masks: Any, monomials: Any
) -> tuple[list[Bits], list[Bits]]:
    """Join digits by one message; returns what is less, and equal where that is asked for (else nothing)."""
    variables = [bits for join in joins for bits in _variables(join, less, equal)]
    sent = np.stack(variables) ^ masks[: len(variables)]
    opened = (sent ^ side.exchange_bits(sent.ravel()).reshape(sent.shape)).astype(np.int64)
    found_less, found_equal = list[Bits](), list[Bits]()
    for join, kept in zip(joins, monomials, strict=False):
        own, opened = opened[: join.monomials.variables], opened[join.monomials.variables :]
        value = np.zeros(own.shape[1], np.int64)
        for at, bits in enumerate(own):
            value |= bits << at
        found_less.append(parity(kept & join.monomials.selectors(join.less_terms)[value]) ^ less[join.digits[-1]])
        found_equal.append(parity(kept & join.monomials.selectors(join.equal_terms)[value]))
    return found_less, found_equal


def _variables(join: Join, less: list[Bits], equal: list[Bits]) -> list[Bits]:
    return [*(equal[at] for at in join.compared), *(less[at] for at in join.lower)]
