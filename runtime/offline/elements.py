"""Element products of all kernels of a program, whose triples are made together, in few calls of SPU.

SPU multiplies elements in whole ciphertexts of 8192 values, and a call costs messages and milliseconds of its own. So
what the kernels of a program take (`ElementTriples`) is made together, in groups that are bounded so that
their ciphertexts fit into memory. A token of a generation has too few elements to fill its ciphertexts, so several
runs of its program are prepared at once. The cost of a group is divided among its steps by their elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aero_compile.runtime.arithmetic.ciphertext_packing import FEW_OWNED, multiply
from aero_compile.runtime.offline.groups import Group, grouped
from aero_compile.runtime.program.parts import KernelStep, ProgramContent
from aero_compile.runtime.roles import SERVER

MOST = 2**18
"""Elements of a group of several steps: 32 ciphertexts of values. SPU takes about 120 MB a party for so many."""

MOST_RUNS = 16
"""Runs of one program that are prepared at once. More would save less than a hundredth of what a run exchanges."""


@dataclass(frozen=True)
class Joined(Group):
    """Products of elements of several steps; `crossed`: each party knows one factor alone."""

    crossed: bool

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

    def product(self, *factors: Any) -> tuple[Any]:
        """The group as a JAX function of two arrays of integers [size]."""
        left, right = factors
        return (left * right if self.owners[0] is not None else multiply(left, right),)


def joined_elements(steps: Sequence[object], runs: int = 1) -> list[Joined]:
    """Group the steps of a program, of which so many runs are prepared, in the order in which groups are made."""
    found = []
    triples = [(at, each.kernel.triples(*each.shapes)) for at, each in enumerate(steps) if isinstance(each, KernelStep)]
    for crossed in (True, False):
        sizes = [(at, runs * each.size) for at, each in triples if each is not None and each.crossed is crossed]
        found += [Joined(each.steps, each.sizes, crossed) for each in grouped(sizes, MOST)]
    return found


def most_runs(steps: Sequence[object], positions: int) -> int:
    """Return how many runs of a program to prepare at once: as many as have their elements in one group of a kind.

    1 where a run has no elements, or fills a group by itself. `positions`: no text has more runs of it.
    """
    groups = joined_elements(steps)
    if len({joined.crossed for joined in groups}) < len(groups) or not groups:
        return 1
    found, largest = MOST_RUNS, max(joined.size for joined in groups)
    while found > 1 and (found > positions or found * largest > MOST):
        found //= 2
    return found


def runs_at_once(program: ProgramContent) -> int:
    """Return how many runs of a program can be prepared at once, by the codes that it has."""
    runs = most_runs(program.steps, program.positions)
    return runs if all(joined.key in program.codes for joined in joined_elements(program.steps, runs)) else 1
