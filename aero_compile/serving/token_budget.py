"""Tokens that each client may still have computed: reserved before a computation, kept across restarts.

The count of a client grows before anything is computed for it, on disk first, and shrinks only by `refund`. So a server
that crashes between the two has spent the tokens, and never hands back any that were perhaps computed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aero_compile.errors import InputError, PartyError
from aero_compile.files import make_private_folder, read_regular, write_private

FILE, LOCK = "tokens.json", "tokens.lock"
FORMAT = 1
LARGEST_FILE = 1 << 22
"""Bytes of the file: ten thousand clients, whose names have at most 100 characters, take a quarter of it."""

MOST_CLIENTS = 10_000
"""Clients that are counted. The file is written for each computation, so it must stay small."""


_USED = b"tokens.json was written\n"
"""Content of the lock's file from then on, so that a count that was removed is missed."""


class OverBudget(PartyError):
    """A client asks for more tokens than it has left."""


class _Content(BaseModel):
    """The file. `digest` is that of `spent`: it shows damage and careless edits, not those of a forger."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: int
    digest: str
    spent: Annotated[
        dict[Annotated[str, Field(max_length=100)], Annotated[int, Field(ge=0, le=1 << 53)]],
        Field(max_length=MOST_CLIENTS),
    ]


class TokenBudget:
    """Counts of all clients of one server.

    Args:
        most: tokens for each client; None: any number.
        folder: where the counts are kept (made with mode 0700; the file has mode 0600); None: in memory alone.

    Raises:
        InputError: the folder cannot be used, another server uses it, or its file is damaged.
    """

    def __init__(self, most: int | None, folder: str | os.PathLike[str] | None = None) -> None:
        self.most = most
        self._path = None if folder is None else Path(folder) / FILE
        self._held = contextlib.ExitStack()
        self._spent = Counter[str]()
        if self._path is not None:
            try:
                lock = self._held.enter_context(_locked(self._path.parent))
                self._spent.update(_read(self._path, is_new=os.fstat(lock).st_size == 0))
                self._write()
                os.pwrite(lock, _USED, 0)
            except OSError as error:
                self.close()
                raise InputError(f"{self._path}: cannot be written: {error.strerror or error}") from error
            except BaseException:
                self.close()
                raise

    def left(self, client: str) -> int | None:
        """Tokens that a client has left; None: any number."""
        return None if self.most is None else max(0, self.most - self._spent[client])

    def check(self, client: str, tokens: int) -> None:
        """Raise OverBudget if `tokens` are more than a client has left, or if it has none."""
        left = self.left(client)
        if left is not None and (left < tokens or left == 0):
            raise OverBudget(f"{client} has {left} of {self.most} tokens left, and this takes {tokens}")

    def reserve(self, client: str, tokens: int) -> Reservation:
        """Spend `tokens` of a client, on disk before this returns.

        Nothing is awaited between the check and the count, so sessions of one client cannot spend a token twice.

        Raises:
            OverBudget: it has fewer left.
            PartyError: the count cannot be written; nothing is spent.
        """
        self.check(client, tokens)
        if client not in self._spent and len(self._spent) >= MOST_CLIENTS:
            raise OverBudget(f"the server counts the tokens of {MOST_CLIENTS:,} clients, and of no more")
        self._add(client, tokens)
        return Reservation(self, client, tokens)

    def _add(self, client: str, tokens: int) -> None:
        before = self._spent[client]
        self._spent[client] = before + tokens
        try:
            self._write()
        except OSError as error:
            self._spent[client] = before
            raise PartyError(f"the server cannot record the tokens of {client}: {error.strerror or error}") from error

    def _write(self) -> None:
        if self._path is None:
            return
        spent = dict(self._spent)
        content = json.dumps({"format": FORMAT, "digest": _digest(spent), "spent": spent}).encode()

        def fill(file: Any) -> None:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

        write_private(self._path, fill)
        _sync(self._path.parent)  # or a power failure could bring back the file that was replaced

    def close(self) -> None:
        """Let another server use the folder."""
        self._held.close()


class Reservation:
    """Tokens of a client that are spent for one computation, until they are given back."""

    def __init__(self, budget: TokenBudget, client: str, tokens: int) -> None:
        self._budget, self._client, self.tokens = budget, client, tokens

    def refund(self) -> None:
        """Give the tokens back, once: of a computation of which nothing was opened, and nothing can be any more.

        Raises:
            PartyError: the count cannot be written; the tokens stay spent.
        """
        tokens, self.tokens = self.tokens, 0
        if tokens:
            self._budget._add(self._client, -tokens)


class ClientTokens:
    """The tokens of one session's client. `reserved`: for the computation that is asked for or runs."""

    def __init__(self, budget: TokenBudget, client: str) -> None:
        self._budget, self._client = budget, client
        self._reserved: Reservation | None = None

    @property
    def left(self) -> int | None:
        """Tokens that are left; None: any number."""
        return self._budget.left(self._client)

    def reserve(self, tokens: int) -> None:
        """Spend tokens for the next computation; raises as `TokenBudget.reserve`."""
        self._reserved = self._budget.reserve(self._client, tokens)

    def check(self) -> None:
        """Raise OverBudget if there is not one left."""
        self._budget.check(self._client, 0)

    def keep_spent(self) -> None:
        """Let the reserved tokens stay spent: they were computed."""
        self._reserved = None

    def refund(self) -> int:
        """Give back what is reserved, and return how many tokens that is; raises as `Reservation.refund`.

        Only after the party's process has ended, and if it has opened nothing: one that lives could still do so.
        """
        reserved, self._reserved = self._reserved, None
        if reserved is None:
            return 0
        tokens = reserved.tokens
        reserved.refund()
        return tokens


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Hold the folder's lock, which ends with this process, however that ends; yields its file's descriptor."""
    try:
        make_private_folder(folder)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InputError(f"{folder}: cannot keep state there: {error.strerror}; give another state=") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(
                f"{folder}: another server counts its clients' tokens there; stop that one, or give this one another "
                "state="
            ) from error
        yield handle
    finally:
        os.close(handle)


def _read(path: Path, is_new: bool) -> dict[str, int]:
    """The counts of a file; none where there was no file yet.

    Raises:
        InputError: it is not one that this version wrote.
    """
    try:
        content = _Content.model_validate_json(read_regular(path, LARGEST_FILE))
        if content.format != FORMAT:
            raise ValueError(f"it has format {content.format}, not {FORMAT}")
        if content.digest != _digest(content.spent):
            raise ValueError("its digest is not that of its counts")
    except (OSError, ValueError) as error:  # pydantic's, too
        if is_new and isinstance(error, FileNotFoundError):
            return {}
        raise InputError(
            f"{path}: the tokens that clients have spent cannot be read: {_reason(error)}; put back a copy of the "
            f"file, or remove it and {LOCK} to let every client start from 0 spent tokens"
        ) from error
    return dict(content.spent)


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part)[:40] for part in first["loc"][:3])
        return f"{place or 'content'}: {first['msg'][:200]}"
    return str(error)[:300]


def _digest(spent: dict[str, int]) -> str:
    return hashlib.sha256(json.dumps(spent, sort_keys=True).encode()).hexdigest()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
