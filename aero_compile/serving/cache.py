"""What clients keep of programs between sessions, by digest, in a private folder that does not grow without end."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from aero_compile.errors import InputError
from aero_compile.files import make_private_folder, read_regular, write_private

MOST_BYTES = 4 << 30
"""Bytes that all files may have together; the one that was used longest ago goes first."""

_NAME = re.compile(r"\.?[0-9a-f]{64}\.(program|published|table)((\.\w+)?\.part)?")
"""Files of ours, those that were being written when their writer was killed among them; others are left alone."""

logger = logging.getLogger("aero_compile.serving.cache")


def part_name(name: str) -> str:
    """Name of the file in which a download is continued."""
    return f".{name}.part"


class Cache:
    """Files named `DIGEST.program`, `DIGEST.published` and `DIGEST.table` in a folder, which is made with mode 0700.

    Nothing is believed of what lies there: whoever reads it checks it as if it came from the server.

    Raises:
        InputError: there is no such folder, and none can be made.
    """

    def __init__(self, folder: str | os.PathLike[str], most: int = MOST_BYTES) -> None:
        self._folder, self._most = Path(folder), most
        try:
            make_private_folder(self._folder)
        except OSError as error:
            raise InputError(f"nothing can be kept in {folder}: {error.strerror}") from error
        if not self._folder.is_dir():
            raise InputError(f"nothing can be kept in {folder}: it is no folder")

    def find(self, name: str, size: int) -> bytes | None:
        """The content of a file of so many bytes, which counts as used now; None if there is none."""
        path = self._folder / name
        try:
            found = read_regular(path, size) if size else b""
            os.utime(path, follow_symlinks=False)
        except OSError:
            return None
        return found if len(found) == size else None

    def keep(self, name: str, content: bytes) -> None:
        """Write a file, and remove others where all are too large together; what cannot be kept is fetched again."""
        if len(content) > self._most:
            return
        try:
            self._make_room(len(content), name)
            write_private(self._folder / name, lambda file: file.write(content))
        except OSError as error:
            logger.warning("nothing is kept in %s: %s", self._folder, error.strerror)

    def place(self, name: str, size: int) -> Path | None:
        """Return the path of a file of so many bytes, after others were removed for it; None if it is not kept."""
        if size > self._most:
            return None
        try:
            self._make_room(size, name)
        except OSError as error:
            logger.warning("nothing is kept in %s: %s", self._folder, error.strerror)
            return None
        return self._folder / name

    def _make_room(self, count: int, name: str) -> None:
        """Remove what was used longest ago, until there is room for `count` bytes under `name`."""
        with os.scandir(self._folder) as entries:
            own = {name, part_name(name)}
            named = [entry for entry in entries if _NAME.fullmatch(entry.name) and entry.name not in own]
            known = [(each.stat(follow_symlinks=False), each.path) for each in named]
        total = count + sum(status.st_size for status, _ in known)
        for status, path in sorted(known, key=lambda each: each[0].st_mtime_ns):
            if total <= self._most:
                return
            Path(path).unlink(missing_ok=True)
            total -= status.st_size
