"""Parties started by hand, as on two hosts, and a network between them that can be watched and cut."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aero_compile.runtime.link.transport import free_addresses, parse_address
from aero_compile.runtime.roles import CLIENT, SERVER

if TYPE_CHECKING:
    from tests.support.runtime_tiny import Exported


@contextlib.contextmanager
def party(
    rank: int, folder: Path, address: str, peer: str, *extra: str, connect_timeout: float = 30
) -> Iterator[subprocess.Popen[str]]:
    """Run one party in `folder`; it is killed at the end if it still runs."""
    inputs = ["--weights", "weights.npz"] if rank == SERVER else ["--tokens", "tokens.npy"]
    if rank != SERVER and not (folder / "tokens.npy").exists():
        inputs = []
    inputs += ["--public", "public.npz"] if (folder / "public.npz").exists() else []
    for name in ("lookup_key.npz", "lookup_table.bin"):
        inputs += ["--lookup", name] if (folder / name).exists() else []
    command = [sys.executable, "-m", "aero_compile.runtime.party", "--rank", str(rank), *inputs]
    command += ["--address", address, "--peer", peer, "--program", "program.json", "--output", "out"]
    command += ["--protocol", _protocol(folder / "program.json")]
    command += ["--connect-timeout", str(connect_timeout), "--timeout", "120", "--runs", "1", *extra]
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@contextlib.contextmanager
def watched(
    files: Exported, *extra: str, delay: float = 0.0
) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str], tuple[Wire, Wire]]]:
    """Run server and client, with these arguments more; between them a wire to the server and one to the client."""
    server_at, client_at = free_addresses(2)
    to_server, to_client = Wire(server_at, delay), Wire(client_at, delay)
    with (
        party(SERVER, files.server, server_at, to_client.address, *extra) as server,
        party(CLIENT, files.client, client_at, to_server.address, *extra) as client,
    ):
        yield server, client, (to_server, to_client)


def both(files: Exported, *extra: str) -> tuple[list[str], list[int], list[bytes]]:
    """Run both parties; returns what they print, their exit codes, and what was sent to the server and the client."""
    with watched(files, *extra) as (server, client, wires):
        outputs = [process.communicate(timeout=100)[0] for process in (server, client)]
        return outputs, [server.returncode, client.returncode], [bytes(wire.seen) for wire in wires]


def both_refused(codes: list[int]) -> bool:
    """True if both parties ended with an error, one with ours: SPU may end the other with 255 once its peer is gone."""
    return all(codes) and 2 in codes


def _protocol(program: Path) -> str:
    """The protocol that the program is for; the default one where it does not say."""
    content = json.loads(program.read_bytes()) if program.is_file() else {}
    return str(content.get("protocol", "cheetah"))


def end_server_in_the_middle(
    server: subprocess.Popen[str], client: subprocess.Popen[str], until: Callable[[], Any] = lambda: True
) -> str:
    """Kill the server while both compute; the client must end by itself, soon and with code 2. Returns its output.

    `until`: what must be so before; the client may be ahead of the server.
    """
    assert client.stdout is not None
    for line in client.stdout:
        if '"step"' in line:
            break
    deadline = time.monotonic() + 20
    while not until() and time.monotonic() < deadline:
        time.sleep(0.01)
    server.kill()
    started = time.monotonic()
    output = client.communicate(timeout=40)[0]
    assert time.monotonic() - started < 30
    assert client.returncode == 2
    return output


def holds(wire: bytes, values: Any) -> bool:
    """Whether `wire` has three consecutive fixed-point numbers that are among `values`, at any offset."""
    wanted = np.rint(np.asarray(values, np.float64).ravel() * 2.0**18).astype(np.int64)
    wanted = np.unique(wanted[np.abs(wanted) > 10_000])  # a small number may be a length or a counter
    near = np.unique((wanted[:, None] + np.arange(-300, 301)).ravel())
    for shift in range(8):
        found = np.frombuffer(wire[shift : shift + (len(wire) - shift) // 8 * 8], "<i8")
        at = np.isin(found, near)
        if (at[:-2] & at[1:-1] & at[2:]).any():
            return True
    return False


class Wire:
    """A TCP forwarder that keeps a copy of everything that passes: `seen`, and by connection and direction `flows`.

    `sinks`: where each of the flows leads. `delay`: seconds that it holds each piece back, so that few steps last
    long enough to end a party in the middle.
    """

    def __init__(self, target: str, delay: float = 0.0) -> None:
        self._target = parse_address(target)
        self._delay = delay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._stalled = threading.Event()
        self.seen = bytearray()
        self.flows: list[bytearray] = []
        self.sinks: list[socket.socket] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self) -> None:
        """Hold every connection open, and pass nothing on any more."""
        self._stalled.set()

    def cut(self) -> None:
        """Close the listener and every connection."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                if self._listener.fileno() < 0:
                    return
                near.close()  # nobody listens behind: refuse, as the target would
                continue
            with self._lock:
                self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        flow = bytearray()
        with self._lock:
            self.flows.append(flow)
            self.sinks.append(sink)
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(self._delay)
                if self._stalled.is_set():
                    continue
                with self._lock:
                    self.seen += data
                    flow += data
                sink.sendall(data)
        for each in () if self._stalled.is_set() else (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
