"""The connection between the parties: addresses, TLS, timeouts, and noticing that the peer is gone."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aero_compile.errors import InputError, PartyError

PROBE_SECONDS = 2.0
PROBES_LOST = 3
PORT_TAKEN = "the port is taken or the address is not of this machine"


@dataclass(frozen=True)
class TLSConfig:
    """Paths of PEM files for a mutually authenticated link: own certificate and key, and the CA of both."""

    certificate: str
    private_key: str
    ca: str

    def check(self) -> None:
        """Raise InputError when a file is missing."""
        for path in (self.certificate, self.private_key, self.ca):
            if not Path(path).is_file():
                raise InputError(f"TLS file not found: {path}")


def free_addresses(count: int) -> list[str]:
    """Return ``count`` distinct loopback addresses ``127.0.0.1:port`` that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    finally:
        for each in sockets:
            each.close()


def parse_address(text: str) -> tuple[str, int]:
    """Split ``host:port``; raises InputError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"{text!r} is not an address of the form host:port")
    return host, int(port)


def connect(
    spu: Any, rank: int, addresses: list[str], timeout: float, connect_timeout: float, tls: TLSConfig | None
) -> Any:
    """Open the link and return SPU's link context. ``addresses`` are those of rank 0 and rank 1.

    Raises:
        PartyError: the own address is taken, the peer does not answer, or TLS fails.
    """
    desc = spu.link.Desc()
    for index, address in enumerate(addresses):
        desc.add_party(f"party{index}", address)
    desc.recv_timeout_ms = max(1, int(timeout * 1000))
    desc.http_timeout_ms = max(1000, int(min(timeout, 120.0) * 1000))
    desc.connect_retry_interval_ms = 200
    desc.connect_retry_times = max(1, int(connect_timeout / 0.2))
    if tls is not None:
        tls.check()
        desc.enable_ssl = True
        for options in (desc.client_ssl_opts, desc.server_ssl_opts):
            options.cert.certificate_path = tls.certificate
            options.cert.private_key_path = tls.private_key
            options.verify.ca_file_path = tls.ca
            options.verify.verify_depth = 2
    try:
        return spu.link.create_brpc(desc, rank)
    except RuntimeError as error:
        if "failed start" in str(error):
            raise PartyError(f"cannot listen on {addresses[rank]}: {PORT_TAKEN}") from error
        raise PartyError(not_connected(addresses[1 - rank], connect_timeout)) from error


def not_connected(peer: str, seconds: float) -> str:
    """Say why there is no link to ``peer`` after ``seconds``."""
    if _listens(peer, 1.0):
        return (
            f"could not connect: {peer} answers, but the link was not completed within {seconds:g} s "
            "(different TLS settings, an untrusted certificate, or a wrong own address at the other party)"
        )
    return f"could not connect: the other party did not appear at {peer} within {seconds:g} s"


def watch_peer(address: str, lost: Callable[[], None]) -> threading.Event:
    """Call ``lost`` from a thread once nothing listens at ``address`` any more; set the event to stop.

    SPU itself waits for a message until its receive timeout, which must be long; a dead process or host is
    noticed here within about ten seconds.
    """
    stop = threading.Event()

    def watch() -> None:
        missed = 0
        while not stop.wait(PROBE_SECONDS):
            missed = 0 if _listens(address, PROBE_SECONDS) else missed + 1
            if missed >= PROBES_LOST and not stop.is_set():
                lost()
                return

    threading.Thread(target=watch, daemon=True, name="peer-watch").start()
    return stop


def _listens(address: str, seconds: float) -> bool:
    """Whether somebody is at ``address``, who then leaves a silent connection open for ``seconds``.

    A forwarder on the way (a tunnel, a container's port, an emulated network) accepts even when nobody is behind it,
    but closes at once.
    """
    try:
        connection = socket.create_connection(parse_address(address), timeout=seconds)
    except OSError:
        return False
    with connection:
        try:
            return connection.recv(1) != b""
        except TimeoutError:
            return True
        except OSError:
            return False


class WireCounter:
    """Bytes on the wire of all TCP connections of this process, as the kernel counts them (Linux).

    Counts everything above TCP: messages, their framing and, with TLS, its records. Connections that were
    closed keep the last value seen at a call.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], tuple[int, int]] = {}

    def read(self) -> tuple[int, int]:
        """Return (bytes sent and acknowledged, bytes received) since the process started."""
        for entry in os.listdir("/proc/self/fd"):
            self._sample(int(entry))
        return (
            sum(sent for sent, _ in self._seen.values()),
            sum(received for _, received in self._seen.values()),
        )

    def _sample(self, descriptor: int) -> None:
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                return
            with socket.socket(fileno=fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0)) as copy:
                if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                    return
                ends = (str(copy.getsockname()), str(copy.getpeername()))
                # struct tcp_info: tcpi_bytes_acked and tcpi_bytes_received are the u64 at 120 and 128.
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        except OSError:
            return
        if len(info) == 136:
            acknowledged, received = struct.unpack_from("=QQ", info, 120)
            self._seen[ends] = (max(0, acknowledged - 1), received)  # the SYN counts as one
