"""Running a kernel: read this party's share out of SPU, compute, and write the results back."""

from __future__ import annotations

from typing import Any

import numpy as np

from aero_compile.runtime.kernels.words import read_words, with_words
from aero_compile.runtime.program_parts import KernelStep

SHARED = -1
"""SPU's owner of what no party knows."""


def run_kernel(spu: Any, io: Any, runtime: Any, step: KernelStep, rank: int) -> None:
    """Run `step` as party `rank` in SPU's `runtime`.

    A value that one party knows is a sum as well: its own number, and zero at the other.

    Raises:
        PartyError: the value is no sum of two numbers in the 64-bit ring.
    """
    results = step.kernel.of_share(rank, read_words(runtime.get_var(step.inputs[0])))
    zeros = np.zeros(step.shape, np.float32)
    for name, words, owner in zip(step.outputs, results, step.kernel.owners, strict=True):
        form = io.make_shares(zeros, spu.Visibility.VIS_SECRET, SHARED if owner is None else owner)[rank]
        runtime.set_var(name, with_words(form, words))
