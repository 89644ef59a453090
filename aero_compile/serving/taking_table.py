"""The encrypted table of a server at a client: downloaded once, in pieces, and checked whenever it is used.

With a cache a download that broke off is continued by the next session, and the table is there for all later ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from aero_compile.console import human_bytes
from aero_compile.errors import PartyError
from aero_compile.runtime.hosts.lookup_files import file_digest
from aero_compile.runtime.hosts.lookup_sizes import LooksUp, encrypted_parts, table_size
from aero_compile.serving.cache import Cache, part_name
from aero_compile.serving.transport.messages import PIECE_BYTES, Table

FetchPiece = Callable[[str, int, int], Awaitable[bytes]]
"""Gets a piece of a table: the table's digest, the number of the piece, its bytes."""

Told = Callable[[int, int], None]
"""Told how many bytes of how many are here."""


def check_table(table: Table | None, program: LooksUp, what: str) -> None:
    """Compare an offered table with what a program looks up, before anything of it is fetched.

    Raises:
        PartyError: there is none, or one too many, or it has another size.
    """
    size, wanted = 0 if table is None else table.size, table_size(program)
    if size != wanted:
        parts = encrypted_parts(program)
        takes = (
            f"takes {parts} of {wanted:,} bytes"
            if program.client_weights
            else (f"looks tokens up in an encrypted table of {wanted:,} bytes")
        )
        raise PartyError(f"{what} {takes}, and {size:,} are offered")


async def take_table(table: Table, folder: Path, fetch: FetchPiece, cache: Cache | None, told: Told) -> Path:
    """Return the file of a table whose digest is right: one that is kept, or what the server sends.

    Args:
        table: what is offered, of a size that was checked.
        folder: private, for a table that is not kept.
        fetch: gets the pieces.
        cache: keeps it, and the pieces that are here where this breaks off.
        told: receives each piece; nothing where the table is here already.

    Raises:
        PartyError: the server sends another table, or there is no room for it.
    """
    name = f"{table.digest}.table"
    kept = None if cache is None else await asyncio.to_thread(cache.place, name, table.size)
    if kept is not None and await asyncio.to_thread(_is_right, kept, table):
        return kept
    try:
        with _opened(kept, folder / name) as (file, place):
            begun = await asyncio.to_thread(_begun, file, table)
            found = await _downloaded(file, begun, table, fetch, told)
            if not found and begun:  # what was kept of it is damaged
                found = await _downloaded(file, 0, table, fetch, told)
            if not found:
                Path(file.name).unlink(missing_ok=True)
                raise PartyError("the server's encrypted table is another one than it offers; connect again, or do not")
            os.replace(file.name, place)
            return place
    except OSError as error:
        raise PartyError(f"cannot keep the server's encrypted table: {error.strerror or error}") from error


def _is_right(path: Path, table: Table) -> bool:
    """True if a regular file has the table's size and digest; it counts as used now."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != table.size or file_digest(path) != table.digest:
            return False
        os.utime(path, follow_symlinks=False)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _opened(kept: Path | None, otherwise: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """Open the file to download into, which no one else writes, and say where it goes in the end."""
    for place in (kept, otherwise):
        if place is None:
            continue
        path = place.with_name(part_name(place.name))
        with open(path, "r+b", buffering=0, opener=_private) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another session downloads it
                continue
            if not _is_named(file, path):  # another session has just ended doing so, and moved it
                continue
            os.fchmod(file.fileno(), 0o600)
            yield file, place
            return


def _private(path: str, _: int) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def _is_named(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except OSError:
        return False


def _begun(file: BinaryIO, table: Table) -> int:
    """Bytes of whole pieces that an earlier session has left; what is behind them is cut off."""
    pieces = min(file.seek(0, os.SEEK_END) // PIECE_BYTES, table.size // PIECE_BYTES)
    file.truncate(pieces * PIECE_BYTES)
    free, missing = shutil.disk_usage(Path(file.name).parent).free, table.size - pieces * PIECE_BYTES
    if free < missing:
        raise PartyError(
            f"the server's encrypted table needs {human_bytes(missing)} in {Path(file.name).parent}, where "
            f"{human_bytes(free)} are free; make room, or name another folder (cache=)"
        )
    return pieces * PIECE_BYTES


async def _downloaded(file: BinaryIO, begun: int, table: Table, fetch: FetchPiece, told: Told) -> bool:
    """Fetch all pieces from a place on; whether the whole is what its digest says."""
    told(begun, table.size)
    for number in range(begun // PIECE_BYTES, table.pieces):
        content = await fetch(table.digest, number, table.piece_size(number))
        await asyncio.to_thread(os.pwrite, file.fileno(), content, number * PIECE_BYTES)
        told(min(table.size, (number + 1) * PIECE_BYTES), table.size)
    return await asyncio.to_thread(file_digest, Path(file.name)) == table.digest
