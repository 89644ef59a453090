"""SPU's connections of a session, forwarded between the Unix sockets of a party and connections to the other side.

SPU listens at `in` and dials `out`, in a folder that only this user may enter; at `out` nobody but the party's own
process is let in.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from aero_compile.errors import PartyError
from aero_compile.runtime.link.channel import CHUNK, Channel

WAIT_SECONDS = 20.0
"""Time for SPU to listen, once the other party has dialled."""

LINKS = 32
"""Connections of one session at once; SPU takes two."""

Counted = Callable[[int, int], None]
"""Is told how many bytes were (received, sent) before they are passed on. If it raises they are not, and the connection
ends."""


class Links:
    """One side of a session's link.

    Args:
        folder: of the party's process.
        lead_out: called with each connection that the own party opens.
        counted: told what passes.
        silence: seconds that an end of a connection may take over a piece.
        owner: number of the user that the party runs as; None: this process's. `folder` is given to it.
    """

    def __init__(
        self,
        folder: Path,
        lead_out: Callable[[Channel], Awaitable[None]],
        counted: Counted,
        silence: float,
        owner: int | None = None,
    ) -> None:
        self._descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        self._folder = Path(f"/proc/self/fd/{self._descriptor}")  # a socket's path may have 107 characters
        self._lead_out, self._counted, self._silence = lead_out, counted, silence
        self._party, self._owner = -1, os.geteuid() if owner is None else owner
        self._open: set[Channel] = set()
        self._server: asyncio.AbstractServer | None = None

    async def listen(self) -> None:
        """Let the party dial, once `admit` has said which process it is."""
        self._server = await asyncio.start_unix_server(self._called, str(self._folder / "out"), limit=CHUNK)
        if self._owner != os.geteuid():
            os.chown("out", self._owner, -1, dir_fd=self._descriptor, follow_symlinks=False)
            os.chown(self._folder, self._owner, -1)

    def admit(self, party: int) -> None:
        """Take calls of the process with this number, and no other."""
        self._party = party

    async def _called(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end: socket.socket = writer.get_extra_info("socket")
        caller, user, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        channel = Channel(reader, writer, self._silence)
        # CancelledError: the loop ends, and asyncio's own caller would complain about it
        with self._held(channel), contextlib.suppress(PartyError, OSError, asyncio.CancelledError):
            if caller == self._party and user == self._owner:
                await self._lead_out(channel)

    async def lead_in(self, outer: Channel) -> None:
        """Lead a connection of the other side to the own party, until either ends."""
        path = self._folder / "in"
        async with asyncio.timeout(WAIT_SECONDS):
            while not path.exists():
                await asyncio.sleep(0.01)
            with self._own_socket() as place:
                reader, writer = await asyncio.open_unix_connection(place, limit=CHUNK)
        inner = Channel(reader, writer, self._silence)
        with self._held(inner):
            await self.join(inner, outer)

    @contextlib.contextmanager
    def _own_socket(self) -> Iterator[str]:
        """The path of the socket at which the party listens, and of no other that it may have put in its place.

        Where the party has another user, this process can connect to sockets that the party cannot.

        Raises:
            PartyError: it is not a socket of the party's user.
        """
        descriptor = os.open("in", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._descriptor)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISSOCK(found.st_mode) or found.st_uid != self._owner:
                raise PartyError("the party does not listen at a socket of its own")
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)

    async def join(self, inner: Channel, outer: Channel) -> None:
        """Pass on what comes from either to the other, until one ends; what was taken by then still arrives."""
        with self._held(outer):
            if len(self._open) > 2 * LINKS:
                raise PartyError(f"a session has {LINKS} connections, and no more")
            ways = [
                asyncio.create_task(_move(outer, inner, lambda count: self._counted(count, 0))),
                asyncio.create_task(_move(inner, outer, lambda count: self._counted(0, count))),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)

    @contextlib.contextmanager
    def _held(self, channel: Channel) -> Iterator[None]:
        self._open.add(channel)
        try:
            yield
        finally:
            self._open.discard(channel)
            channel.close()

    def close(self) -> None:
        """End all connections and take no more."""
        if self._server is not None:
            self._server.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        for channel in [*self._open]:
            channel.abort()


async def _move(source: Channel, sink: Channel, counted: Callable[[int], None]) -> None:
    """Pass bytes on as they come; more is read only when what was read has left."""
    with contextlib.suppress(OSError):
        while data := await source.reader.read(CHUNK):
            counted(len(data))
            sink.writer.write(data)
            await sink.writer.drain()
