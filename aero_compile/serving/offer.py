"""What a server offers: programs of one model, each for one length, with the weights that they take."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aero_compile.errors import InputError
from aero_compile.runtime.hosts.party_inputs import held_inputs
from aero_compile.runtime.program import Program
from aero_compile.runtime.program_parts import TensorSpec
from aero_compile.runtime.roles import SERVER
from aero_compile.serving.process.orders import Held
from aero_compile.serving.transport.agreement import facts_of
from aero_compile.serving.transport.messages import MOST_PROGRAMS, Facts


@dataclass(frozen=True)
class Served:
    """A program that is offered: what is agreed about it, its content, the weights that clients are given, files."""

    facts: Facts
    content: bytes
    published: bytes
    held: Held
    weight_bytes: int


def read_offer(folders: Sequence[str | os.PathLike[str]], protocol: str) -> tuple[Served, ...]:
    """Read folders that `aero_compile.runtime.export` wrote, each a program with its weights.

    Raises:
        InputError: a file is missing or damaged, a weight is no finite number, or the programs do not go together.
    """
    if not 1 <= len(folders) <= MOST_PROGRAMS:
        raise InputError(f"a server offers 1 to {MOST_PROGRAMS} programs, not {len(folders)}")
    found = tuple(_read(Path(folder), protocol) for folder in folders)
    facts = [each.facts for each in found]
    for name in ("vocabulary", "ring_bits", "fraction_bits", "batch"):
        if len(kinds := {getattr(each, name) for each in facts}) > 1:
            raise InputError(f"the programs are of different models: their {name} is one of {sorted(kinds)}")
    if len({each.length for each in facts}) < len(facts):
        raise InputError(f"two programs are for the same length: {sorted(each.length for each in facts)}")
    return found


def _read(folder: Path, protocol: str) -> Served:
    files = {name: folder / name for name in ("program.json", "weights.npz", "public.npz")}
    public = files["public.npz"] if files["public.npz"].exists() else None
    inputs = held_inputs(SERVER, files["program.json"], protocol, files["weights.npz"], public)
    for name, array in (*inputs.own.items(), *inputs.published.items()):
        if not np.isfinite(array).all():
            raise InputError(f"weight {name} of {folder} holds numbers that are not finite (NaN or infinity)")
    published = pack(inputs.program.published, inputs.published)
    held = Held(
        program=str(files["program.json"].resolve()),
        weights=str(files["weights.npz"].resolve()),
        published=None if public is None else str(public.resolve()),
    )
    weight_bytes = sum(array.nbytes for array in inputs.own.values())
    facts = facts_of(inputs.program, len(published))
    return Served(facts, inputs.program.to_bytes(), published, held, weight_bytes)


def pack(specs: Sequence[TensorSpec], arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """The arrays that `specs` declare, one after the other."""
    return b"".join(np.ascontiguousarray(arrays[spec.name]).tobytes() for spec in specs)


def unpack(program: Program, content: bytes) -> dict[str, npt.NDArray[Any]]:
    """The arrays that a program publishes, as `pack` wrote them.

    Raises:
        InputError: there are more or fewer bytes than the program declares.
    """
    found, at = {}, 0
    for spec in program.published:
        count = int(np.prod(spec.shape))
        size = count * np.dtype(spec.dtype).itemsize
        if at + size > len(content):
            break
        found[spec.name] = np.frombuffer(content, spec.dtype, count, at).reshape(spec.shape)
        at += size
    if at != len(content) or len(found) != len(program.published):
        raise InputError(f"the weights that clients are given come in {len(content):,} bytes, which are not theirs")
    return found
