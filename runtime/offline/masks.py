"""Random words of one run of a program, and codes of whole numbers that run on a party's words."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from aero_compile.runtime.kernels.run import SHARED
from aero_compile.runtime.kernels.side import Side
from aero_compile.runtime.kernels.words import Words, read_words, with_words
from aero_compile.runtime.program_parts import KernelStep, ProgramContent

Argument = tuple[tuple[int, ...], int | None, Words | None]
"""Of a code: its shape, the rank of its owner (None: shares), and what this party has of it (None: nothing)."""


class Masks:
    """The random words that one party draws for a run of a program, from the operating system's generator.

    A step may take those of the step that made one of its arguments, which is before it.
    """

    def __init__(self, rank: int, program: ProgramContent) -> None:
        self._rank, self._program = rank, program
        self._drawn: dict[int, dict[str, Words]] = {}
        self._made: dict[int, dict[str, int]] = {}
        made: dict[str, int] = {}
        for at, step in enumerate(program.steps):
            self._made[at] = {name: made[name] for name in step.inputs if name in made}
            made |= dict.fromkeys(step.outputs, at)

    def of(self, at: int) -> dict[str, Words]:
        """The words of this party for the step of this number, by name, the same whenever they are asked for."""
        if at not in self._drawn:
            self._drawn[at] = self._of(at)
        return self._drawn[at]

    def _of(self, at: int) -> dict[str, Words]:
        step = self._program.steps[at]
        assert isinstance(step, KernelStep)
        plan = step.kernel.triples(*step.shapes) or step.kernel.preparation(*step.shapes)
        assert plan is not None
        found = {}
        for random in plan.randoms:
            if random.taken is not None:
                found[random.name] = self.of(self._made[at][step.inputs[random.taken]])[random.name]
            elif random.owner in (None, self._rank):
                words = np.frombuffer(os.urandom(8 * math.prod(random.shape)), "<u8")
                found[random.name] = words.astype(np.uint64)
        return found


def run_on_words(side: Side, io: Any, runtime: Any, label: str, code: str, arguments: Sequence[Argument]) -> Words:
    """Run a code of whole numbers in SPU's `runtime`; returns this party's share of its result, uint64 [elements]."""
    spu, names = side.spu, [f"in{at}" for at in range(len(arguments))]
    for name, (shape, owner, words) in zip(names, arguments, strict=True):
        zeros = np.zeros(shape, np.int32)
        form = io.make_shares(zeros, spu.Visibility.VIS_SECRET, SHARED if owner is None else owner)[side.rank]
        runtime.set_var(name, with_words(form, np.zeros(zeros.size, np.uint64) if words is None else words))
    runtime.run(spu.Executable(label, names, ["product"], code.encode()))
    product = read_words(runtime.get_var("product"))
    for name in (*names, "product"):
        runtime.del_var(name)
    return product
