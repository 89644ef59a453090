"""Running a kernel: read shares out of SPU, compute on their words, and write the results back."""

from __future__ import annotations

from typing import Any

import numpy as np

from aero_compile.runtime.kernels.kernel import Result
from aero_compile.runtime.kernels.side import Side
from aero_compile.runtime.kernels.words import Words, as_bits, read_words, with_words
from aero_compile.runtime.program_parts import KernelStep

SHARED = -1
"""SPU's owner of what no party knows."""


def run_kernel(side: Side, io: Any, runtime: Any, step: KernelStep) -> None:
    """Run `step` as one party, in SPU's `runtime`.

    A value that one party knows is a sum as well: its own number, and zero at the other.

    Raises:
        PartyError: an argument is no sum of two numbers in the 64-bit ring.
    """
    found = step.kernel.run(side, *(_argument(side, runtime, step, at) for at in range(len(step.inputs))))
    for name, words, result in zip(step.outputs, found, step.kernel.results(*step.shapes), strict=True):
        owner = SHARED if result.owner is None else result.owner
        form = _zeros(side.spu, io, result, owner)[side.rank]
        runtime.set_var(name, with_words(as_bits(form) if result.dtype == "bool" else form, words))


def _argument(side: Side, runtime: Any, step: KernelStep, at: int) -> Words:
    kernel, name = step.kernel, step.inputs[at]
    if at in kernel.unread:
        return np.zeros(0, np.uint64)
    if at in kernel.of_server and side.weight is not None:
        return side.weight(name)
    return read_words(runtime.get_var(name))


def rehearse_kernel(spu: Any, io: Any, runtime: Any, step: KernelStep, draw: np.random.Generator) -> None:
    """Run `step` on numbers in the clear, in a `runtime` of SPU's reference protocol."""
    found = step.kernel.together(draw, *(read_words(runtime.get_var(name)) for name in step.inputs))
    for name, words, result in zip(step.outputs, found, step.kernel.results(*step.shapes), strict=True):
        runtime.set_var(name, with_words(_zeros(spu, io, result, SHARED)[0], words))


def _zeros(spu: Any, io: Any, result: Result, owner: int) -> Any:
    return io.make_shares(np.zeros(result.shape, result.dtype), spu.Visibility.VIS_SECRET, owner)
