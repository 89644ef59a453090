"""Both parties' computation of a compiled function on shares, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from aero_compile.runtime.online.interpreter import run_on_shares
from aero_compile.runtime.online.plan import SharePlan
from aero_compile.runtime.online.truncation import BitProducts, bit_products
from aero_compile.runtime.roles import CLIENT, SERVER
from tests.support.kernel_sides import Pair, side_of, split

FRACTION_BITS = 18
UNIT = 2.0**-FRACTION_BITS


def code_of(function: Callable[..., Any], arguments: Sequence[npt.NDArray[Any]], public: Sequence[int] = ()) -> str:
    """Compile a JAX function to PPHLO text; `public`: numbers of the arguments that both parties know."""
    import spu
    import spu.utils.frontend as frontend

    names = [f"in{at}" for at in range(len(arguments))]
    kinds = [spu.Visibility.VIS_PUBLIC if at in public else spu.Visibility.VIS_SECRET for at in range(len(arguments))]
    kind = frontend.Kind.JAX
    executable, _ = frontend.compile(
        kind, function, list(arguments), {}, names, kinds, lambda outputs: [f"out{at}" for at in range(len(outputs))]
    )
    code = executable.code
    return code.decode() if isinstance(code, bytes) else str(code)


def drawn_products(count: int, draw: np.random.Generator) -> tuple[BitProducts, BitProducts]:
    """Bit products of both parties, as the offline phase makes them."""
    own = [draw.integers(2, size=count).astype(np.bool_) for _ in range(2)]
    theirs = draw.integers(2**32, size=count, dtype=np.uint32)
    return bit_products(own[SERVER], 2 * (own[0] & own[1]).astype(np.uint32) - theirs), bit_products(
        own[CLIENT], theirs
    )


def run_shares(
    plan: SharePlan, arguments: Sequence[npt.NDArray[Any]], draw: np.random.Generator
) -> tuple[list[npt.NDArray[np.int64]], Pair]:
    """What a plan computes of `arguments`: words of secrets, uint64, and public values; and the link between both."""
    pair, shared = Pair(), [split(each, draw) if each.dtype == np.uint64 else (each, each) for each in arguments]
    prepared = drawn_products(plan.truncated, draw)
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(
                run_on_shares,
                side_of(rank, pair),
                plan,
                [each[rank] for each in shared],
                prepared[rank],
                FRACTION_BITS,
            )
            for rank in (SERVER, CLIENT)
        ]
        servers, clients = (run.result(timeout=60) for run in runs)
    return [(mine + theirs).astype(np.int64) for mine, theirs in zip(servers, clients, strict=True)], pair
