"""The endpoint's place: a port, or a Unix socket that its owner alone can connect to."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from aero_compile.errors import InputError


@contextlib.contextmanager
def port_listener(host: str, port: int) -> Iterator[socket.socket]:
    """Listen at a port, until the end.

    Raises:
        InputError: the port is taken, or the address is not of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        taken = "is in use; choose another --port" if error.errno == errno.EADDRINUSE else f"cannot be: {error}"
        raise InputError(f"{host}:{port} {taken}") from error
    except OverflowError as error:
        raise InputError(f"--port {port} is not a port: {error}") from error
    with listener:
        yield listener


@contextlib.contextmanager
def socket_listener(path: Path) -> Iterator[socket.socket]:
    """Listen at a Unix socket of mode 0600, until the end; then it is removed.

    The process's umask is changed for the moment in which the socket is made, so that it never has a wider mode: call
    it before other threads make files.

    Raises:
        InputError: something is there that is not the socket of an endpoint that has ended, or it cannot be made.
    """
    _remove_dead(path)
    with socket.socket(socket.AF_UNIX) as listener:
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        except OSError as error:
            raise InputError(f"--socket {path} cannot be made: {error}") from error
        finally:
            os.umask(before)
        try:
            listener.listen()
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _remove_dead(path: Path) -> None:
    """Remove a socket at which nobody listens any more."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if stat.S_ISSOCK(mode):
        with socket.socket(socket.AF_UNIX) as end:
            try:
                end.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
                return
            except OSError as error:
                raise InputError(f"--socket {path} cannot be used: {error}") from error
    raise InputError(f"--socket {path} exists; remove it, or choose another path")
