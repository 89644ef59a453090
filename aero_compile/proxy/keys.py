"""Keys of the endpoint's callers: one line `NAME KEY` each, in a file that its owner alone can read."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path

from aero_compile.errors import InputError
from aero_compile.files import make_private_folder, read_regular, refuse_exposed, write_private

KEYS, FIRST = "keys", "default"
KEY_BYTES = 32
"""Random bytes of a key."""
LARGEST_FILE = 1 << 16
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[A-Za-z0-9_-]{22,200}")
"""At least 128 bits in base64; those made here have 256."""


def default_folder() -> Path:
    """Return the folder where keys are kept by default (https://specifications.freedesktop.org/basedir-spec/).

    Raises:
        InputError: the user has no home.
    """
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise InputError("this user has no home folder: name a folder for the keys with --state") from error
    return Path(state) / "aero-compile" / "proxy"


def new_key(folder: Path, name: str) -> str:
    """Make a key for a caller and add it to the keys in `folder`, which is made with mode 0700.

    Raises:
        InputError: the name is taken or cannot be one, the folder or the file is open to other users, the file is
            malformed, or nothing can be written there.
    """
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} cannot name a key: take 1 to 64 letters, digits and . _ -")
    path, key = folder / KEYS, secrets.token_urlsafe(KEY_BYTES)
    try:
        make_private_folder(folder)
        known = _read(path) if path.exists() else {}
        if name in known:
            raise InputError(f"{path} has a key {name} already; remove its line, or choose another name")
        lines = "".join(f"{each} {value}\n" for each, value in {**known, name: key}.items())
        _check_folder(folder)
        write_private(path, lambda file: file.write(lines.encode()))
    except OSError as error:
        raise InputError(f"{folder}: keys cannot be kept there: {error}; choose another folder") from error
    return key


class Keys:
    """The keys in a folder, read again whenever the file has changed.

    Raises:
        InputError: there is no file, other users can read or write it or enter the folder, or it is malformed.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / KEYS
        self._version: tuple[int, ...] = ()
        self._digests: list[bytes] = []
        self._refresh()

    def caller(self, key: str) -> str | None:
        """Return what stands for the caller with this key; None for a key that is not in the file.

        A key is compared with all others by its digest, in a time that does not depend on either. What is returned
        stands for the key, not for its name: a name that gets another key is another caller.

        Raises:
            InputError: the file cannot be used now.
        """
        self._refresh()
        given, found = hashlib.sha256(key.encode()).digest(), None
        for digest in self._digests:
            if hmac.compare_digest(given, digest):
                found = digest.hex()
        return found

    def _refresh(self) -> None:
        try:
            _check_folder(self.path.parent)
            status = os.stat(self.path)
        except OSError as error:
            raise InputError(f"{self.path}: the keys cannot be read: {error.strerror}") from error
        version = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if version != self._version:
            self._digests = [hashlib.sha256(key.encode()).digest() for key in _read(self.path).values()]
            self._version = version


def _check_folder(folder: Path) -> None:
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o077:
        raise InputError(f"{folder}: has mode {mode:04o}, and other users can enter it; chmod 700 {folder}")


def _read(path: Path) -> dict[str, str]:
    """The keys of a file, by name."""
    refuse_exposed(path)
    try:
        lines = read_regular(path, LARGEST_FILE).decode("ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: the keys cannot be read: {error}") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        name, _, key = line.partition(" ")
        if not _NAME.fullmatch(name) or not _KEY.fullmatch(key) or name in found or key in found.values():
            raise InputError(f"{path}: line {number} is not a name and a key of its own, divided by one space")
        found[name] = key
    return found
