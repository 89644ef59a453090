"""Making a preparation: random words, and shares of their products with the server's matrices."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy.typing as npt

from aero_compile.errors import PartyError
from aero_compile.runtime.kernels.side import Side
from aero_compile.runtime.kernels.words import Words, read_words
from aero_compile.runtime.offline.elements import prepare_elements
from aero_compile.runtime.offline.masks import Argument, Masks, run_on_words
from aero_compile.runtime.offline.store import Prepared
from aero_compile.runtime.program_parts import KernelStep, ProgramContent
from aero_compile.runtime.roles import SERVER

NAME_BYTES = 16
"""Of a preparation's name: no two ever have the same."""


def prepared_steps(program: ProgramContent) -> list[tuple[int, KernelStep]]:
    """The steps for which something is prepared by itself, with their numbers; others are in `element_batches`."""
    calls = [(at, step) for at, step in enumerate(program.steps) if isinstance(step, KernelStep) and step.preparation]
    return [(at, step) for at, step in calls if step.kernel.triples(*step.shapes) is None]


def prepare(
    side: Side,
    io: Any,
    runtime: Any,
    program: ProgramContent,
    weights: Mapping[str, npt.NDArray[Any]],
    profile: Callable[[str], dict[str, Any]],
) -> tuple[Prepared, list[dict[str, Any]]]:
    """Prepare one run of `program` as one party, in SPU's `runtime`, with the peer.

    `weights`: the server's; the client has none. `profile` gives the record of the last execution, called as it says.

    Returns:
        What is kept for the run, and for each step its number, label and place with what it cost.
    """
    masks = Masks(side.rank, program)
    found: Prepared = {}
    rows = []
    for at, step in prepared_steps(program):
        begun = time.perf_counter()
        found[at] = _prepare(side, io, runtime, program.codes[step.preparation], step, weights, masks.of(at))
        record = profile(f"the preparation of step {at}, {step.label} ({step.place})")
        rows.append({"at": at, "op": step.label, "place": step.place, "seconds": time.perf_counter() - begun, **record})
    return found, [*rows, *prepare_elements(side, io, runtime, program, masks, found, profile)]


def _prepare(
    side: Side,
    io: Any,
    runtime: Any,
    code: str,
    step: KernelStep,
    weights: Mapping[str, npt.NDArray[Any]],
    kept: dict[str, Words],
) -> dict[str, Words]:
    """Multiply what this party `kept` of the random words of a step; returns them with its share of the product."""
    spu, plan = side.spu, step.kernel.preparation(*step.shapes)
    assert plan is not None
    arguments: list[Argument] = []
    for random in plan.randoms:
        arguments.append((random.shape, random.owner, kept[random.name] if random.owner in (None, side.rank) else None))
    for number in plan.weights:
        own = _encoded(spu, io, weights[step.inputs[number]]) if side.rank == SERVER else None
        arguments.append((step.shapes[number], SERVER, own))
    kept["product"] = run_on_words(side, io, runtime, step.label, code, arguments)
    return kept


def _encoded(spu: Any, io: Any, weight: npt.NDArray[Any]) -> Words:
    """A matrix as the integers that SPU computes with."""
    return read_words(io.make_shares(weight, spu.Visibility.VIS_SECRET, SERVER)[SERVER])


def agreed_name(link: Any) -> str:
    """A name for a preparation that both parties draw together."""
    drawn = link.all_gather(os.urandom(NAME_BYTES).hex())
    return bytes(a ^ b for a, b in zip(*map(bytes.fromhex, drawn), strict=True)).hex()


def agree(link: Any, rank: int, mine: Iterable[str]) -> str:
    """The name of a preparation that both parties have and neither has used: the first in order.

    Raises:
        PartyError: there is none.
    """
    own = sorted(mine)
    theirs = json.loads(link.all_gather(json.dumps(own))[1 - rank])
    common = sorted(set(own) & {name for name in theirs if isinstance(name, str)})
    if not common:
        raise PartyError(
            f"the parties have no unused preparation of this program in common ({len(own)} here, {len(theirs)} there): "
            "make some with both (--offline)"
        )
    return common[0]
