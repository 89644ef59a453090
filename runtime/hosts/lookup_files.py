"""The files of tables that are looked up under encryption: the server's keys, and what clients download once.

They serve every run of the programs and weights that they were made for. The clients' file begins with `MAGIC`; then
follow, for each table by name, the words of its rows [V, w], of the seed and of the public key's part b, all of which
the program's shapes say the sizes of. Its SHA-256 is in the server's file, and the parties compare it before they
start.
"""

from __future__ import annotations

import hashlib
import mmap
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from aero_compile.errors import InputError
from aero_compile.files import refuse_exposed, write_private
from aero_compile.runtime.kernels.lookup_table import Held, degree_for, encrypted_table
from aero_compile.runtime.kernels.ring_encryption import SEED_WORDS
from aero_compile.runtime.kernels.words import Words
from aero_compile.runtime.offline.store import fingerprint
from aero_compile.runtime.roles import CLIENT, SERVER

FILES = {SERVER: "lookup_key.npz", CLIENT: "lookup_table.bin"}
"""What each role has, beside the program."""

MAGIC = b"aero_compile encrypted table/1\n\0"
"""A multiple of 8 bytes, so that words behind it can be mapped into memory."""

DIGEST_WORDS = 4
_DIGEST, _ABOUT = "table", "about"
_PARTS = ("rows", "seed", "public")

Tables = dict[str, Held]
"""What a party holds of each table, by the table's name in the program."""

Weights = Mapping[str, npt.NDArray[Any]]


class LooksUp(Protocol):
    """A program, or all programs of a generation."""

    @property
    def looked_up(self) -> dict[str, tuple[int, ...]]:
        """The tables that are looked up under encryption, with their shapes."""

    @property
    def fraction_bits(self) -> int:
        """Of the fixed-point format."""


def table_size(program: LooksUp) -> int:
    """Bytes of the file that clients download once for the tables of a program; 0 where none is looked up."""
    shapes = program.looked_up.values()
    return len(MAGIC) + sum(8 * count for shape in shapes for count in _counts(shape)) if shapes else 0


def made_tables(program: LooksUp, weights: Weights) -> tuple[Tables, Tables]:
    """Draw keys and encrypt the tables: what the server and what clients hold of them."""
    server, client = Tables(), Tables()
    for name in program.looked_up:
        scaled = np.rint(weights[name].astype(np.float64) * 2.0**program.fraction_bits).astype(np.int64)
        rows = scaled.view(np.uint64) << np.uint64(program.fraction_bits)
        server[name], client[name] = encrypted_table(rows)
    return server, client


def write_tables(program: LooksUp, weights: Weights, server: Path, client: Path) -> None:
    """Encrypt the tables under new keys, and write both files (mode 0600), if the program looks anything up."""
    if not program.looked_up:
        return
    keys, tables = made_tables(program, weights)
    write_private(client, lambda file: _write(file, tables))
    arrays = {f"secret:{table}": held["secret"] for table, held in keys.items()}
    arrays |= {_DIGEST: _words(bytes.fromhex(file_digest(client))), _ABOUT: _words(about(program, weights))}
    write_private(server, lambda file: np.savez(file, **arrays))  # last: it names the other file


def _write(file: BinaryIO, tables: Tables) -> None:
    file.write(MAGIC)
    for name in sorted(tables):
        for part in _PARTS:
            file.write(np.ascontiguousarray(tables[name][part], "<u8").data)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def about(program: LooksUp, weights: Weights) -> bytes:
    """Digest of the weights that a program looks up, and of how: equal ones can share a key and a table."""
    content = fingerprint(f"tables:{program.fraction_bits}", {name: weights[name] for name in program.looked_up})
    return bytes.fromhex(content)


def _words(content: bytes) -> Words:
    return np.frombuffer(content, np.uint64)


def read_tables(path: Path, program: LooksUp, rank: int, weights: Weights) -> tuple[str, Tables]:
    """The SHA-256 of the clients' file and what a party holds of each table; `weights`: the server's.

    The client's rows are mapped into memory, not read.

    Raises:
        InputError: the file is missing, damaged, of the other party, or made for other weights or another program; or
            it is the server's, which holds the key, and other users can read or write it.
    """
    try:
        return _read_key(path, program, weights) if rank == SERVER else _read_table(path, program)
    except (OSError, ValueError, EOFError, KeyError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is no {FILES[rank]} of this program: {error}") from error


def _read_key(path: Path, program: LooksUp, weights: Weights) -> tuple[str, Tables]:
    refuse_exposed(path)
    with np.load(path, allow_pickle=False) as file:
        digest, made_for = (_checked(file, name, (DIGEST_WORDS,)) for name in (_DIGEST, _ABOUT))
        degrees = {table: (degree_for(shape[1]),) for table, shape in program.looked_up.items()}
        found = {table: {"secret": _checked(file, f"secret:{table}", size)} for table, size in degrees.items()}
    if made_for.tobytes() != about(program, weights):
        raise InputError(f"{path} was made with other weights; export the program anew, and give clients the new table")
    return digest.tobytes().hex(), dict(found)


def _checked(file: Any, name: str, shape: tuple[int, ...]) -> Words:
    array: Words = file[name]
    if array.dtype != np.uint64 or array.shape != shape:
        raise ValueError(f"{name} is {array.dtype} {array.shape}, not words {shape}")
    return array


def _read_table(path: Path, program: LooksUp) -> tuple[str, Tables]:
    with path.open("rb") as file:
        if (size := file.seek(0, 2)) != (wanted := table_size(program)):
            raise ValueError(f"it has {size:,} bytes, not {wanted:,}")
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if mapped[: len(MAGIC)] != MAGIC:
        raise ValueError("it does not begin as one")
    found, at = Tables(), len(MAGIC)
    for name, shape in sorted(program.looked_up.items()):
        parts = {}
        for part, count in zip(_PARTS, _counts(shape), strict=True):
            parts[part] = np.frombuffer(mapped, "<u8", count, at)
            at += 8 * count
        found[name] = {**parts, "rows": parts["rows"].reshape(shape)}
    return hashlib.sha256(mapped).hexdigest(), found


def _counts(shape: tuple[int, ...]) -> Iterator[int]:
    """Words of each of the `_PARTS` of a table."""
    yield from (shape[0] * shape[1], SEED_WORDS, degree_for(shape[1]))
