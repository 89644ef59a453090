"""Programs of a generation for two hosts: compiled without any text, and written for both parties."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from aero_compile.files import make_private_folder, write_private
from aero_compile.runtime.compilation import AUTO, Options
from aero_compile.runtime.generation.compilation import compile_for_generation
from aero_compile.runtime.generation.programs import CompiledGeneration
from aero_compile.runtime.hosts.lookup_files import FILES, write_tables
from aero_compile.runtime.hosts.network_spec import Network, parse_network
from aero_compile.runtime.hosts.parties import PUBLIC
from aero_compile.runtime.inference import batches, names_of
from aero_compile.runtime.operators.format import Format
from aero_compile.runtime.roles import CLIENT, SERVER
from aero_compile.runtime.spu_config import import_spu
from aero_compile.runtime.tolerances import DEFAULT, Tolerances

WEIGHTS = "weights.npz"

SHORTEST_FILL = 8
"""Positions of the smallest program that computes a prompt at once."""


def compile_generation(
    model: nn.Module,
    room: int | Iterable[int],
    protocol: str = "cheetah",
    *,
    fills: Iterable[int] | None = None,
    checks: Iterable[int] = (),
    running_sums: bool = False,
    optimize: bool = True,
    calibration: Any = None,
    clamp: bool = True,
    guards: bool = True,
    public: str | Sequence[str] = (),
    offline: bool = False,
    tolerances: Tolerances = DEFAULT,
    field: int = 64,
    fraction_bits: int = 18,
    lookup: str = AUTO,
    weights_at_client: bool = False,
    network: str | Network = "loopback",
) -> CompiledGeneration:
    """Compile what two parties run to generate texts of up to `room` tokens, without any text.

    Args:
        model: a transformed model, or any decoder, which is captured as it is.
        room: tokens of a text, the generated ones included, at least 2. What a token costs grows with it. Of several
            numbers a text has the room of the smallest until that is full, and then of the next.
        protocol: as of `private_inference`.
        fills: how many tokens of a prompt are computed at once, by one program each, which takes shorter prompts too;
            None: 8, 16, 32, … and `room` less one.
        checks: how many tokens are checked at once, by one program each: the last one of a text and those that the
            client guesses behind it.
        running_sums: of heads that attend to all positions so far alike, let the parties hold one sum instead of the
            values of all positions. What they hold then only goes on: a text that is changed anywhere is computed anew
            from its first token, nothing is guessed, and prompts take programs that they fill.
        lookup, weights_at_client: as of `private_inference`, for each program by itself.
        optimize, calibration, clamp, guards, public, offline, tolerances, field, fraction_bits, network: as of
            `compile_model`.

    Raises:
        InputError: room, counts or options that the model or the protocol cannot take.
        UnsupportedModelError: new positions of this model cannot be computed by themselves.
        LoweringError: the model cannot be computed privately, or its logits would be too far off.
    """
    form, between = Format(field, fraction_bits, tolerances), parse_network(network)
    options = Options(
        *(protocol, form, batches(calibration), "all", optimize, clamp, guards, names_of(public), offline, between),
        lookup=lookup,
        weights_at_client=weights_at_client,
    )
    import_spu()
    rooms = [room] if isinstance(room, int) else sorted({*room})
    prompts = usual_fills(max(rooms, default=0)) if fills is None else fills
    return compile_for_generation(model, rooms, prompts, options, checks=checks, running_sums=running_sums)


def usual_fills(room: int) -> list[int]:
    """Powers of two, and what a full prompt takes: all but its last token, which is a step."""
    found = []
    size = SHORTEST_FILL
    while size < room - 1:
        found.append(size)
        size *= 2
    return [*found, room - 1] if room > 2 else found


def export_generation(compiled: CompiledGeneration, directory: str | os.PathLike[str], *, tables: bool = True) -> None:
    """Write the programs and `public.npz`, for both parties, and `weights.npz`, for the server only (mode 0600).

    Where tables are looked up under encryption, `lookup_key.npz` is for the server only and `lookup_table.bin` for
    clients, as of `aero_compile.runtime.export`; with `tables=False` both are left out.

    The folder is made with mode 0700 if it does not exist; programs are named by their digests.
    """
    target = Path(directory)
    make_private_folder(target)
    write_private(target / WEIGHTS, lambda file: np.savez(file, **compiled.weights))
    write_private(target / PUBLIC, lambda file: np.savez(file, **compiled.published))
    if tables:
        write_tables(compiled.programs, compiled.weights, target / FILES[SERVER], target / FILES[CLIENT])
    compiled.programs.save(target)  # last: its index says that all is there
