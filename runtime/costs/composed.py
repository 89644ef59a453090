"""Functions that SPU composes of bitwise protocols, products and truncations: which part waits for which.

What SPU 0.9.5 prints with `enable_action_trace` under the settings of the table. Bytes, messages and seconds of the
bitwise parts of a function are measured together (`CostTable.kernels`); products and truncations are billed as always.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from aero_compile.runtime.costs.session import Session

_HIGHEST_BIT = (*("and",) * 13, "b2a")
"""Of a positive number: its share becomes bits, all bits below the highest one become ones, one becomes a number."""

_ONE, _TWO = ("product", "trunc"), ("product2", "trunc2")
_INVERSE = ("less", "b2a", "product", *_HIGHEST_BIT, *_ONE * 3, "square", "trunc", *_ONE * 2)
_ROOT = (*_HIGHEST_BIT, *_ONE * 2, *_TWO, "trunc", "b2a", "b2a", "product", "product", "trunc")

COMPOSED: dict[str, tuple[str, ...]] = {
    "reciprocal": (*_INVERSE, "product"),
    "divide": (*_INVERSE, *_ONE, "product"),
    "rsqrt": _ROOT,
    "sqrt": (*_ROOT, *_ONE, "trunc", *_ONE * 3),
    "log": (*_HIGHEST_BIT, "b2a", "b2a", *_ONE * 2, *_TWO, "product4", "trunc4", "trunc", "trunc"),
}
"""The parts of each function, in order; a number behind one: of so many times the elements."""


def bill_composed(session: Session, kind: str, n: int) -> None:
    """Bill the function `kind` of n elements."""
    session.transfer(kind, n)
    billed: dict[str, Callable[[int], None]] = {
        "product": session.product,
        "square": session.square,
        "trunc": partial(session.transfer, "trunc"),
    }
    for part in COMPOSED[kind]:
        name = part.rstrip("0123456789")
        if name in billed:
            billed[name](int(part.removeprefix(name) or 1) * n)
        else:
            session.follow(name)
