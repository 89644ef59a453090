"""The programs of a generation, which both parties hold: a prompt at once, and one position after another.

All take and leave the same cached values, so they run on the shares that the others left. Which of them runs, and at
which position, both parties know: lengths of texts are public.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt

from aero_compile.errors import InputError
from aero_compile.files import read_regular, write_atomically
from aero_compile.runtime.program import Program

INDEX = "generation.json"
FORMAT = 1
LARGEST_INDEX = 2**20
"""Bytes that the index may have."""


@dataclass(frozen=True)
class Programs:
    """`step` computes one position anywhere, with its logits; `advance` the same without them.

    `fills` compute so many positions from the first on, without logits; `checks` so many anywhere, with the logits of
    all.
    """

    step: Program
    advance: Program
    fills: Mapping[int, Program] = field(default_factory=dict)
    checks: Mapping[int, Program] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """Positions that there is room for."""
        return self.step.positions

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        return self.step.tokens.shape[2]

    @property
    def all(self) -> dict[str, Program]:
        """All programs by name: those that fill by their counts, those that check by `check_name`."""
        found = {"step": self.step, "advance": self.advance, **{str(n): each for n, each in sorted(self.fills.items())}}
        return found | {check_name(n): each for n, each in sorted(self.checks.items())}

    @property
    def digest(self) -> str:
        """SHA-256 of all programs, which the parties compare before anything else."""
        return hashlib.sha256(self._index()).hexdigest()

    def plan(self, count: int, position: int) -> list[tuple[str, int]]:
        """How `count` positions from `position` on are computed without logits: programs by name, and how many of
        their positions are kept.

        A prompt that no fill fits takes the next larger one: what it computes behind the prompt is overwritten before
        anything looks at it.
        """
        found: list[tuple[str, int]] = []
        if position == 0 and count > 1 and self.fills:
            larger = [size for size in self.fills if size >= count]
            size = min(larger) if larger else max(self.fills)
            found.append((str(size), min(size, count)))
            count -= found[0][1]
        return found + [("advance", 1)] * count

    def _index(self) -> bytes:
        digests = {name: program.digest for name, program in self.all.items()}
        return json.dumps({"format": FORMAT, "programs": digests}, sort_keys=True).encode()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write every program to the folder under its digest, and last the index."""
        for program in self.all.values():
            program.save(Path(folder) / f"{program.digest}.json")
        write_atomically(Path(folder) / INDEX, self._index())

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Programs:
        """Read what `save` wrote; every program is checked before any is run.

        Raises:
            InputError: a file is missing, damaged, of another version or not what the index says, or the programs do
                not go on from each other's cached values.
        """
        path = Path(folder) / INDEX
        try:
            content = json.loads(read_regular(path, LARGEST_INDEX))
            if content["format"] != FORMAT:
                raise InputError(f"{path} is of another version of aero_compile")
            digests = {str(name): str(digest) for name, digest in content["programs"].items()}
            counts = {name: count_of(name) for name in digests}
            step, advance = digests["step"], digests["advance"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path} does not name the programs of a generation: {error}") from error
        found = {digest: _load(Path(folder), digest) for digest in {*digests.values()}}
        ordered = sorted(counts.keys() - {"step", "advance"}, key=counts.__getitem__)
        checks = {counts[name]: found[digests[name]] for name in ordered if name.startswith(CHECK)}
        fills = {counts[name]: found[digests[name]] for name in ordered if not name.startswith(CHECK)}
        programs = cls(found[step], found[advance], fills, checks)
        check(programs)
        return programs


CHECK = "check-"
"""What names of programs that check begin with."""


def check_name(count: int) -> str:
    """Name of the program that computes so many positions anywhere, with their logits."""
    return f"{CHECK}{count}"


def count_of(name: str) -> int:
    """How many positions the program of a name computes; ValueError if it is no name of one."""
    return 1 if name in ("step", "advance") else int(name.removeprefix(CHECK))


def check(programs: Programs) -> None:
    """Raise InputError if the programs are no generation: one goes on where another left off."""
    step = programs.step
    shared = (step.protocol, step.field, step.fraction_bits, step.cached, step.versions)
    for name, each in programs.all.items():
        theirs = (each.protocol, each.field, each.fraction_bits, each.cached, each.versions)
        if theirs != shared or not each.cached:
            raise InputError(f"the program {name!r} does not go on from the cached values of the others")
        count, is_fill = count_of(name), name.isdigit()
        opens = name == "step" or name.startswith(CHECK)
        if each.tokens.shape != (1, count, programs.vocabulary) or each.opens != opens:
            raise InputError(f"the program {name!r} does not compute {count} positions of one text")
        if not 1 <= count <= programs.room:
            raise InputError(f"the program {name!r} has no room for its positions")
        places = 0 if is_fill else programs.room - count + 1
        if each.positions != places:
            raise InputError(f"the program {name!r} computes at {each.positions} positions, not {places}")


def _load(folder: Path, digest: str) -> Program:
    if len(digest) != 64 or not digest.isalnum():
        raise InputError(f"{digest[:80]!r} is no digest of a program")
    program = Program.load(folder / f"{digest}.json")
    if program.digest != digest:
        raise InputError(f"{folder / digest}.json is not the program that it is named after")
    return program


@dataclass(frozen=True)
class CompiledGeneration:
    """The programs, the weights that only the server may hold, and the arrays that both parties hold.

    Of arrays that follow from the position there are values for all, [positions, ...].
    """

    programs: Programs
    weights: dict[str, npt.NDArray[Any]]
    published: dict[str, npt.NDArray[Any]]
