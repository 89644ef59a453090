"""The files of tables that are looked up under encryption: the server's keys, and what clients download once.

They serve every run of the program and weights that they were made for. Both have the name of the key, which parties
compare before they start.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aero_compile.errors import InputError
from aero_compile.files import refuse_exposed, write_private
from aero_compile.runtime.kernels.lookup_table import Held, degree_for, encrypted_table
from aero_compile.runtime.kernels.ring_encryption import SEED_WORDS
from aero_compile.runtime.kernels.words import Words
from aero_compile.runtime.offline.store import fingerprint
from aero_compile.runtime.program_parts import ProgramContent
from aero_compile.runtime.roles import CLIENT, SERVER

FILES = {SERVER: "lookup_key.npz", CLIENT: "lookup_table.npz"}
"""What each role has, beside the program."""

NAME_WORDS = 2
_NAME, _ABOUT = "name", "about"

Tables = dict[str, Held]
"""What a party holds of each table, by the table's name in the program."""


def made_tables(program: ProgramContent, weights: Mapping[str, npt.NDArray[Any]]) -> tuple[Tables, Tables]:
    """Draw keys and encrypt the tables: what the server and what clients hold of them."""
    server, client = Tables(), Tables()
    for name in program.looked_up:
        scaled = np.rint(weights[name].astype(np.float64) * 2.0**program.fraction_bits).astype(np.int64)
        rows = scaled.view(np.uint64) << np.uint64(program.fraction_bits)
        server[name], client[name] = encrypted_table(rows)
    return server, client


def write_tables(program: ProgramContent, weights: Mapping[str, npt.NDArray[Any]], server: Path, client: Path) -> None:
    """Encrypt the tables under new keys, and write both files (mode 0600), if the program looks anything up."""
    if not program.looked_up:
        return
    name = np.frombuffer(os.urandom(8 * NAME_WORDS), np.uint64)
    about = {_ABOUT: _about(program, weights)}
    for path, tables, more in zip((server, client), made_tables(program, weights), (about, {}), strict=True):
        arrays = {f"{part}:{table}": words for table, held in tables.items() for part, words in held.items()}
        _write(path, {_NAME: name, **more, **arrays})


def _write(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    write_private(path, lambda file: np.savez(file, **arrays))


def _about(program: ProgramContent, weights: Mapping[str, npt.NDArray[Any]]) -> Words:
    content = bytes.fromhex(fingerprint("tables", {name: weights[name] for name in program.looked_up}))
    return np.frombuffer(content, np.uint64)


def read_tables(
    path: Path, program: ProgramContent, rank: int, weights: Mapping[str, npt.NDArray[Any]]
) -> tuple[str, Tables]:
    """The name of the key and what a party holds of each table; `weights`: the server's.

    Raises:
        InputError: the file is missing, damaged, of the other party, or made for other weights or another program; or
            it is the server's, which holds the key, and other users can read or write it.
    """
    if rank == SERVER:
        refuse_exposed(path)
    found = Tables()
    try:
        with np.load(path, allow_pickle=False) as file:
            name = _checked(file, _NAME, (NAME_WORDS,))
            for table, shape in program.looked_up.items():
                parts = {part: _checked(file, f"{part}:{table}", size) for part, size in _parts(rank, shape).items()}
                found[table] = parts
            about = _checked(file, _ABOUT, (4,)) if rank == SERVER else None
    except (OSError, ValueError, EOFError, KeyError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is no {FILES[rank]} of this program: {error}") from error
    if about is not None and not np.array_equal(about, _about(program, weights)):
        raise InputError(f"{path} was made with other weights; export the program anew, and give clients the new table")
    return name.tobytes().hex(), found


def _parts(rank: int, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    degree = (degree_for(shape[1]),)
    return {"secret": degree} if rank == SERVER else {"rows": shape, "seed": (SEED_WORDS,), "public": degree}


def _checked(file: Any, name: str, shape: tuple[int, ...]) -> Words:
    array: Words = file[name]
    if array.dtype != np.uint64 or array.shape != shape:
        raise ValueError(f"{name} is {array.dtype} {array.shape}, not words {shape}")
    return array
