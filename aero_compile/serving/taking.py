"""What a client takes over from a server: programs, read before they are run, and the weights that it is given."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from aero_compile.errors import PartyError
from aero_compile.files import write_private
from aero_compile.runtime.costs.allowance import Allowance, allowance_of, generation_allowances
from aero_compile.runtime.generation.arrays import are_published, published_specs
from aero_compile.runtime.generation.programs import FORMAT, INDEX, Programs
from aero_compile.runtime.hosts.lookup_sizes import LooksUp
from aero_compile.runtime.prefix import digest_of
from aero_compile.runtime.program import Program
from aero_compile.runtime.program_parts import TensorSpec
from aero_compile.runtime.roles import CLIENT
from aero_compile.serving.cache import Cache
from aero_compile.serving.link_budget import Allowances
from aero_compile.serving.offer import unpack
from aero_compile.serving.process.orders import Held, Load
from aero_compile.serving.taking_table import Told, check_table, take_table
from aero_compile.serving.transport.agreement import check_same, check_versions, facts_of, generation_of, model_digest
from aero_compile.serving.transport.messages import LARGEST_TABLE, Facts, Generation, Offer, Table

LARGEST_GIVEN = 1 << 32
"""Bytes of weights that a client takes."""

Part = Literal["program", "published", "table"]


class Fetch(Protocol):
    """Gets a part of a program, by its digest, of so many bytes; or a piece of a table, by that one's digest."""

    def __call__(self, digest: str, part: Part, size: int, piece: int = 0) -> Awaitable[bytes]:
        """Return what gives its content."""


@dataclass(frozen=True)
class Taken:
    """The order that loads the client's party, what that may receive, and the programs of a generation, if any.

    `table_bytes`: what was downloaded of encrypted tables.
    """

    order: Load
    generation: Programs | None
    allowances: Allowances
    table_bytes: int = 0


def check_offer(offer: Offer, protocol: str, wanted: str | None) -> None:
    """Compare what a server offers with what the client accepts: its protocol, and the model's digest or any.

    Raises:
        PartyError: what differs.
    """
    check_versions(offer.wire, offer.versions, "the server")
    steps = [] if offer.generation is None else [*offer.generation.programs.values()]
    if not offer.programs and not steps:
        raise PartyError("the server offers nothing")
    for facts in (*offer.programs, *steps):
        if facts.protocol != protocol:
            raise PartyError(_other_protocol(facts.protocol, protocol))
    given = [facts.published_size for facts in offer.programs]
    given += [] if offer.generation is None else [offer.generation.published_size]
    if max(given) > LARGEST_GIVEN:
        raise PartyError(f"the server gives {max(given):,} bytes of weights; at most {LARGEST_GIVEN:,} are taken")
    tables = {facts.table.digest: facts.table.size for facts in offer.programs if facts.table is not None}
    if offer.generation is not None and offer.generation.table is not None:
        tables[offer.generation.table.digest] = offer.generation.table.size
    if (size := sum(tables.values())) > LARGEST_TABLE:
        raise PartyError(f"the server gives {size:,} bytes of tables; at most {LARGEST_TABLE:,} are taken")
    found = model_digest(offer.programs, offer.generation)
    if wanted not in (None, found) or offer.digest != found:
        raise PartyError(f"the server offers the model {found}, not {wanted or offer.digest}")


def _other_protocol(theirs: str, own: str) -> str:
    """What to do about a server that computes in another protocol than this client accepts."""
    if own == "cheetah":
        return (
            f"the server computes in {theirs}, and this client accepts {own} alone: in {theirs} the server could open "
            f"the client's shares. To accept it all the same: protocol={theirs!r} here"
        )
    return (
        f"the server computes in {theirs}, and this client accepts {own} alone, in which the server could open the "
        f"client's shares: leave protocol={own!r} out here"
    )


async def take_offer(
    offer: Offer, folder: Path, fetch: Fetch, cache: Cache | None = None, told: Told = lambda here, all_of_it: None
) -> Taken:
    """Take all programs into `folder`; each is read, and refused unless it keeps the tokens secret.

    What `cache` has of them is not fetched, and is read and refused in the same way. `told`: of encrypted tables, how
    many bytes of how many are here, piece by piece.

    Raises:
        InputError: a program is not one to run.
        PartyError: it is not the one that was offered, or cannot be kept.
    """
    taker = _Taker(folder, fetch, cache, told)
    held = tuple([await taker.whole(facts) for facts in offer.programs])
    if offer.generation is None:
        return Taken(Load(programs=held), None, Allowances(taker.allowances, {}), taker.table_bytes)
    programs, steps = await taker.generation(offer.generation)
    allowed = await asyncio.to_thread(generation_allowances, programs, CLIENT, offer.most_rows > 0)
    allowances = Allowances(taker.allowances, allowed)
    return Taken(Load(programs=held, generation=steps), programs, allowances, taker.table_bytes)


class _Taker:
    def __init__(self, folder: Path, fetch: Fetch, cache: Cache | None, told: Told) -> None:
        self._folder, self._fetch, self._cache, self._told = folder, fetch, cache, told
        self._tables: dict[str, str] = {}
        self.allowances: dict[str, Allowance] = {}
        self.table_bytes = 0

    async def whole(self, facts: Facts) -> Held:
        path = self._folder / f"{facts.digest}.json"
        await self._content(facts, path)
        program = await asyncio.to_thread(Program.load, path)
        check_same(facts, facts_of(program, facts.published_size, facts.table), "the server's program")
        table = await self._table(facts.table, program, "the server's program")
        self.allowances[facts.digest] = await asyncio.to_thread(allowance_of, program, CLIENT)
        if not facts.published_size:
            return Held(program=str(path), table=table)
        arrays = path.with_suffix(".npz")

        def are_right(given: Mapping[str, npt.NDArray[Any]]) -> bool:
            return digest_of(given) == program.published_digest

        await self._arrays(facts.digest, facts.published_size, program.published, are_right, arrays)
        return Held(program=str(path), published=str(arrays), table=table)

    async def generation(self, offered: Generation) -> tuple[Programs, Held]:
        folder = self._folder / "generation"
        folder.mkdir(mode=0o700)
        for facts in offered.programs.values():
            await self._content(facts, folder / f"{facts.digest}.json")
        digests = {name: facts.digest for name, facts in offered.programs.items()}
        index = json.dumps({"format": FORMAT, "programs": digests}).encode()
        await asyncio.to_thread(_keep, folder / INDEX, lambda file: file.write(index))
        programs = await asyncio.to_thread(Programs.load, folder)
        found = generation_of(programs, offered.published_size, offered.table)
        for name, facts in offered.programs.items():
            check_same(facts, found.programs[name], f"the server's program {name}")
        if found != offered:
            raise PartyError("the server's generation is another one than it offers")
        table = await self._table(offered.table, programs, "the server's generation")
        arrays = folder / "public.npz"
        are_right = partial(are_published, programs)
        await self._arrays(offered.digest, offered.published_size, published_specs(programs), are_right, arrays)
        return programs, Held(program=str(folder), published=str(arrays), table=table)

    async def _table(self, table: Table | None, program: LooksUp, what: str) -> str | None:
        """The file of the encrypted table that a program looks tokens up in, if it does."""
        check_table(table, program, what)
        if table is None:
            return None
        if table.digest not in self._tables:

            async def fetch(digest: str, piece: int, size: int) -> bytes:
                content = await self._fetch(digest, "table", size, piece)
                self.table_bytes += len(content)
                return content

            path = await take_table(table, self._folder, fetch, self._cache, self._told)
            self._tables[table.digest] = str(path.resolve())
        return self._tables[table.digest]

    async def _content(self, facts: Facts, path: Path) -> None:
        content = await self._part(
            facts.digest, "program", facts.size, lambda found: hashlib.sha256(found).hexdigest() == facts.digest
        )
        await asyncio.to_thread(_keep, path, lambda file: file.write(content))

    async def _arrays(
        self,
        digest: str,
        size: int,
        specs: Sequence[TensorSpec],
        are_right: Callable[[Mapping[str, npt.NDArray[Any]]], bool],
        path: Path,
    ) -> None:
        given: dict[str, npt.NDArray[Any]] = {}
        if size:
            given = unpack(
                specs, await self._part(digest, "published", size, lambda found: are_right(unpack(specs, found)))
            )
        await asyncio.to_thread(_keep, path, lambda file: np.savez(file, **given))

    async def _part(self, digest: str, part: Part, size: int, is_right: Callable[[bytes], bool]) -> bytes:
        """A part as it is kept here, or else as the server sends it, which is kept if it is what the digest says."""
        if self._cache is None:
            return await self._fetch(digest, part, size)
        name = f"{digest}.{part}"
        kept = await asyncio.to_thread(self._cache.find, name, size)
        if kept is not None and await asyncio.to_thread(is_right, kept):
            return kept
        content = await self._fetch(digest, part, size)
        if await asyncio.to_thread(is_right, content):
            await asyncio.to_thread(self._cache.keep, name, content)
        return content


def _keep(path: Path, write: Callable[[Any], object]) -> None:
    try:
        write_private(path, write)
    except OSError as error:
        raise PartyError(f"cannot keep what the server sent in {path.parent}: {error.strerror}") from error
