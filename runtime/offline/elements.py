"""Batches of element products: the triples of all kernels of a program, in few calls of SPU.

SPU multiplies elements in whole ciphertexts of 8192 values, and a call costs messages and milliseconds of its own. So
what the kernels of a program take (`kernels/element_triples.py`) is made together, in batches that are bounded so that
their ciphertexts fit into memory. What a batch costs is told of its steps by their elements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aero_compile.runtime.arithmetic.filling import FEW_OWNED, multiply
from aero_compile.runtime.kernels.side import Side
from aero_compile.runtime.kernels.words import Words
from aero_compile.runtime.offline.masks import Argument, Masks, run_on_words
from aero_compile.runtime.offline.store import Prepared
from aero_compile.runtime.program_parts import KernelStep, ProgramContent
from aero_compile.runtime.roles import SERVER

MOST = 2**18
"""Elements of a batch of several steps: 32 ciphertexts of values. SPU takes about 120 MB a party for so many."""


@dataclass(frozen=True)
class ElementBatch:
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
        """Key of its code in a program; batches of one kind and size share one."""
        return f"elements.{'crossed' if self.crossed else 'shared'}.{self.size}"

    @property
    def owners(self) -> tuple[int | None, int | None]:
        """Ranks of the parties that SPU takes for the owners of the factors; None: it takes shares.

        In Cheetah a product of two owned values costs as much as one of two shares. One of an owned value and a share,
        which here is all the client's, costs two thirds; but not of few elements, which take stored triples.
        """
        return (SERVER if self.crossed and self.size >= FEW_OWNED else None), None

    def divided(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Rows of its steps, each with what the whole batch cost: bytes and seconds cut by elements, exact in sum.

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
        """The batch as a JAX function of two arrays of integers [size]."""
        left, right = factors
        return (left * right if self.owners[0] is not None else multiply(left, right),)


def element_batches(steps: Sequence[object]) -> list[ElementBatch]:
    """The batches of a program's steps, in the order in which they are made."""
    found = []
    triples = [(at, each.kernel.triples(*each.shapes)) for at, each in enumerate(steps) if isinstance(each, KernelStep)]
    for crossed in (True, False):
        sizes = [(at, each.size) for at, each in triples if each is not None and each.crossed is crossed]
        found += [ElementBatch(crossed, *zip(*group, strict=True)) for group in _groups(sizes)]
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


def prepare_elements(
    side: Side,
    io: Any,
    runtime: Any,
    program: ProgramContent,
    masks: Masks,
    found: Prepared,
    profile: Callable[[str], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Make the element products of one run of `program`, as one party, in SPU's `runtime`, with the peer.

    What is kept of them goes to `found`, by the numbers of steps. `profile` is that of `prepare`.

    Returns:
        For each step its number, label and place with its part of what was spent.
    """
    rows = []
    for batch in element_batches(program.steps):
        begun = time.perf_counter()
        _multiply(side, io, runtime, program, batch, masks, found)
        record = profile(f"the preparation of {batch.size:,} elements") | {"seconds": time.perf_counter() - begun}
        called = [(at, program.steps[at]) for at in batch.steps]
        rows += batch.divided([{"at": at, "op": step.label, "place": step.place, **record} for at, step in called])
    return rows


def _multiply(
    side: Side, io: Any, runtime: Any, program: ProgramContent, batch: ElementBatch, masks: Masks, found: Prepared
) -> None:
    """Multiply the factors of a batch, and keep for each of its steps this party's share of the products."""
    factors = []
    for at in batch.steps:
        step = program.steps[at]
        assert isinstance(step, KernelStep)
        plan = step.kernel.triples(*step.shapes)
        assert plan is not None
        factors.append(plan.factors(masks.of(at)))
    joined: list[Words | None] = [np.concatenate(each) for each in zip(*factors, strict=True)]
    if batch.crossed:
        joined = [*joined, None] if side.rank == SERVER else [None, *joined]
    arguments: list[Argument] = [((batch.size,), owner, own) for owner, own in zip(batch.owners, joined, strict=True)]
    product = run_on_words(side, io, runtime, "elements", program.codes[batch.key], arguments)
    for at, words in zip(batch.steps, np.split(product, np.cumsum(batch.sizes)[:-1]), strict=True):
        found[at] = {**masks.of(at), "product": words}
