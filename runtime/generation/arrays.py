"""The arrays of a generation: of all its programs together, each once, since they share names and values."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from aero_compile.errors import InputError
from aero_compile.runtime.generation.programs import Programs
from aero_compile.runtime.hosts.party_inputs import Arrays, read_arrays
from aero_compile.runtime.prefix import digest_of
from aero_compile.runtime.program_parts import TensorSpec


def published_specs(programs: Programs) -> list[TensorSpec]:
    """The arrays that both parties hold, each once."""
    return _once(spec for each in programs.all.values() for spec in each.published)


def weight_specs(programs: Programs) -> list[TensorSpec]:
    """The server's weights, each once."""
    return _once(spec for each in programs.all.values() for spec in each.weights)


def read_published(programs: Programs, path: Path) -> Arrays:
    """Read the arrays that both parties hold, the same as when the programs were compiled.

    Raises:
        InputError: the file is damaged, or has other arrays.
    """
    found = read_arrays(path, published_specs(programs))
    if not are_published(programs, found):
        raise InputError(f"{path} does not hold the arrays that the programs were compiled with")
    return found


def are_published(programs: Programs, found: Arrays) -> bool:
    """Whether the arrays that both parties hold are those that the programs were compiled with."""
    for program in programs.all.values():
        own = {spec.name: found[spec.name] for spec in program.published}
        if program.published and digest_of(own) != program.published_digest:
            return False
    return True


def read_weights(programs: Programs, path: Path) -> Arrays:
    """Read the server's weights.

    Raises:
        InputError: the file is damaged, or has other arrays.
    """
    return read_arrays(path, weight_specs(programs))


def _once(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    return list({spec.name: spec for spec in specs}.values())
