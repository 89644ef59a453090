"""Running a kernel on the words of shares, as one party or in a rehearsal."""

from __future__ import annotations

from typing import Any

import numpy as np

from aero_compile.runtime.kernels.share_words import widened
from aero_compile.runtime.kernels.side import Side
from aero_compile.runtime.kernels.values import Values
from aero_compile.runtime.program_parts import KernelStep


def run_kernel(side: Side, values: Values, step: KernelStep) -> None:
    """Run `step` as one party, on its `values`.

    A value that one party knows is a sum as well: its own number, and zero at the other.

    Raises:
        PartyError: an argument is not a sum of two numbers in the 64-bit ring.
    """
    found = step.kernel.run(side, *(_argument(side, values, step, at) for at in range(len(step.inputs))))
    for name, words, result in zip(step.outputs, found, step.kernel.results(*step.shapes), strict=True):
        values.put(name, result, words)


def _argument(side: Side, values: Values, step: KernelStep, at: int) -> Any:
    kernel, name = step.kernel, step.inputs[at]
    if at in kernel.unread:
        return np.zeros(0, np.uint64)
    if at in kernel.of_server and side.weight is not None:
        weight = side.weight(name)
        return weight if at in kernel.as_integers else widened(weight)
    return values.words(name)


def rehearse_kernel(values: Values, step: KernelStep, draw: np.random.Generator) -> None:
    """Run `step` on `values` of a rehearsal."""
    found = step.kernel.together(draw, *(values.words(name) for name in step.inputs))
    for name, words, result in zip(step.outputs, found, step.kernel.results(*step.shapes), strict=True):
        values.put(name, result, words)
