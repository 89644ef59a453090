"""Contents and size of the clients' file of encrypted tables and weights, as far as a program tells them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from aero_compile.runtime.kernels.encrypted_lookup import degree_for
from aero_compile.runtime.kernels.encrypted_weights import sizes
from aero_compile.runtime.kernels.ring_algebra import SEED_WORDS

if TYPE_CHECKING:
    from aero_compile.runtime.program.parts import ClientMatrix


MAGIC = b"aero_compile encrypted table/1\n\0"
"""A multiple of 8 bytes, so that words behind it can be mapped into memory."""


class LooksUp(Protocol):
    """A program, or all programs of a generation."""

    @property
    def looked_up(self) -> dict[str, tuple[int, ...]]:
        """The tables that are looked up under encryption, with their shapes."""

    @property
    def client_weights(self) -> dict[str, ClientMatrix]:
        """The matrices that clients multiply with, encrypted, by the names under which they are held."""

    @property
    def fraction_bits(self) -> int:
        """Of the fixed-point format."""


def table_size(program: LooksUp) -> int:
    """Bytes of the file that clients download once for the tables and weights of a program; 0 if there are none."""
    found = sum(_size(parts) for parts in layout(program).values())
    return len(MAGIC) + found if found else 0


def weight_size(program: LooksUp) -> int:
    """Bytes of that file that are of encrypted weights."""
    matrices = program.client_weights.values()
    found = sum(_size(sizes(matrix.inner, matrix.columns)) for matrix in matrices)
    return found + len(MAGIC) if found and not program.looked_up else found


def encrypted_parts(program: LooksUp) -> str:
    """What a program takes of that file, for messages; "" if it takes none."""
    parts = [(program.looked_up, "lookups under encryption"), (program.client_weights, "weights at the client")]
    return " and ".join(what for found, what in parts if found)


def layout(program: LooksUp) -> dict[str, dict[str, tuple[int, ...]]]:
    """Names and shapes, in words, of what the clients' file holds of each table and matrix, in its order."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in sorted(program.looked_up.items()):
        found[name] = {"rows": shape, "seed": (SEED_WORDS,), "public": (degree_for(shape[1]),)}
    for name, matrix in sorted(program.client_weights.items()):
        found[name] = sizes(matrix.inner, matrix.columns)
    return found


def _size(parts: Mapping[str, tuple[int, ...]]) -> int:
    return sum(8 * math.prod(shape) for shape in parts.values())
