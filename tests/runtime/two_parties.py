"""One JAX function of shared secrets, run between two threads: for functions that are no operator of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from aero_compile.runtime.live import LiveProgram, LiveStep
from aero_compile.runtime.program import TOKENS
from tests.runtime.graphs import simulate

Array = npt.NDArray[np.float64]


def in_two_parties(function: Callable[[Any], Any], x: Array, protocol: str = "semi2k") -> Array:
    """``function`` of a secret that each party holds a summand of."""
    from aero_compile.runtime.spu_compile import compile_steps

    clients = np.random.default_rng(0).integers(-(2**18), 2**18, x.shape) * 2.0**-10
    step = LiveStep(
        *("softmax", "here", "softmax", ("server", TOKENS), ("result",), (x.shape,) * 2, ("float32",) * 2),
        lambda server, client: (function(server + client),),
    )
    servers = (x - clients).astype(np.float32)
    rows, entries = x.shape
    live = LiveProgram((step,), {"server": servers}, (1, rows, entries), "result", x.shape, frozenset())
    program = compile_steps(live, protocol, 64, 18)
    return simulate(program, {TOKENS: clients.astype(np.float32)}, live.weights)
