"""Element products of all kernels of a program, whose triples are made together, in few calls of SPU.

SPU multiplies elements in whole ciphertexts of 8192 values, and a call costs messages and milliseconds of its own. So
what the kernels of a program take (`ElementTriples`) is made together, in groups that are bounded so that
their ciphertexts fit into memory. The cost of a group is divided among its steps by their elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aero_compile.runtime.arithmetic.filling import FEW_OWNED, multiply
from aero_compile.runtime.program_parts import KernelStep
from aero_compile.runtime.roles import SERVER

MOST = 2**18
"""Elements of a group of several steps: 32 ciphertexts of values. SPU takes about 120 MB a party for so many."""


@dataclass(frozen=True)
class Joined:
    """Products of elements of several steps: their numbers, and how many elements each has.

    `crossed`: each party knows one factor alone.
    """

    crossed: bool
    steps: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements of all its steps."""
        return sum(self.sizes)

    @property
    def key(self) -> str:
        """Key of its code in a program; groups of one kind and size share one."""
        return f"elements.{'crossed' if self.crossed else 'shared'}.{self.size}"

    @property
    def owners(self) -> tuple[int | None, int | None]:
        """Ranks of the parties that SPU takes for the owners of the factors; None: it takes shares.

        In Cheetah a product of two owned values costs as much as one of two shares. One of an owned value and a share,
        which here is all the client's, costs two thirds; but not of few elements, which take stored triples.
        """
        return (SERVER if self.crossed and self.size >= FEW_OWNED else None), None

    def divided(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Rows of its steps, each with what the whole group cost: bytes and seconds cut by elements, exact in sum.

        Messages and records stay whole, with the first step.
        """
        found: list[dict[str, Any]] = []
        for row, end, size in zip(rows, np.cumsum(self.sizes).tolist(), self.sizes, strict=True):
            parts: dict[str, Any] = {
                name: value * end // self.size - value * (end - size) // self.size
                for name, value in row.items()
                if name.endswith("bytes")
            }
            parts |= {name: value * size / self.size for name, value in row.items() if name.endswith("seconds")}
            whole = ("at", "op", "place") if found else tuple(row)
            left = {name: value if name in whole else type(value)() for name, value in row.items() if name not in parts}
            found.append({**left, **parts})
        return found

    def product(self, *factors: Any) -> tuple[Any]:
        """The group as a JAX function of two arrays of integers [size]."""
        left, right = factors
        return (left * right if self.owners[0] is not None else multiply(left, right),)


def joined_elements(steps: Sequence[object]) -> list[Joined]:
    """The groups of a program's steps, in the order in which they are made."""
    found = []
    triples = [(at, each.kernel.triples(*each.shapes)) for at, each in enumerate(steps) if isinstance(each, KernelStep)]
    for crossed in (True, False):
        sizes = [(at, each.size) for at, each in triples if each is not None and each.crossed is crossed]
        found += [Joined(crossed, *zip(*group, strict=True)) for group in _groups(sizes)]
    return found


def _groups(sizes: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cut steps with their sizes in runs of `MOST` elements at most; a larger step is one by itself."""
    groups: list[list[tuple[int, int]]] = []
    total = 0
    for at, size in sizes:
        if not groups or total + size > MOST:
            groups.append([])
            total = 0
        groups[-1].append((at, size))
        total += size
    return groups
