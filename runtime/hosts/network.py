"""Measuring under a network: the processes of this machine talk through one that limits and delays them."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from aero_compile.errors import PartyError
from aero_compile.runtime.hosts import lockstep, relay
from aero_compile.runtime.hosts.network_spec import Network

BACKLOG = 128

END_SECONDS = 2.0
"""Time for the process to write its log."""


class Relay:
    """A process that carries connections to two addresses over an emulated network, while the context is open.

    A connection to `addresses[i]` reaches `targets[i]` ("host:port"); the network lies between the hosts of
    the two targets. In each direction by itself (full duplex), bytes leave at `network.mbps` at most, shared by
    all connections in turns, and arrive `network.rtt_ms / 2` after they left, in order. Connecting takes a round
    trip, and is refused as the target refuses. The bandwidth counts what TCP carries, not its headers; losses and
    TCP's slow start are not emulated. The process ends with its launcher. `log`: where it writes what left when, for
    `aero_compile.runtime.hosts.traffic`.
    """

    def __init__(self, network: Network, targets: Sequence[str], log: Path | None = None) -> None:
        if network.lockstep and not Path("/proc/self/schedstat").exists():
            raise PartyError("rounds cannot be counted here: this system does not tell when threads run (schedstat)")
        listeners = [socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) for _ in targets]
        self.addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in listeners]
        routes = [f"{each.fileno()}={target}" for each, target in zip(listeners, targets, strict=True)]
        script = lockstep.__file__ if network.lockstep else relay.__file__
        # -I -S: only the standard library, hence up within a tenth of a second, and nobody's site packages.
        command = [sys.executable, "-I", "-S", script, *routes]
        command += [] if network.lockstep else ["--mbps", repr(network.mbps), "--rtt-ms", repr(network.rtt_ms)]
        command += [] if log is None else ["--log", str(log)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[each.fileno() for each in listeners]
        )
        for each in listeners:
            each.close()

    def watch(self, processes: Iterable[int]) -> None:
        """Tell a network in lockstep the numbers of the parties' processes; it delivers nothing before."""
        assert self.process.stdin is not None
        self.process.stdin.write((" ".join(map(str, processes)) + "\n").encode())
        self.process.stdin.flush()

    def end(self) -> None:
        """End the process and with it every connection."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=END_SECONDS)  # which closes its standard input
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()
