"""The words of an SPU share: one unsigned 64-bit number for each element, in the ring that the parties compute in.

SPU hands a share out as a description (`meta`) and chunks, each a protobuf message with the total size (field 1), an
offset (field 2) and the bytes themselves (field 3), little-endian.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aero_compile.errors import PartyError

Words = npt.NDArray[np.uint64]

_CONTENT = 3 << 3 | 2
"""Tag of a chunk's bytes: field 3, length-delimited."""


def read_words(share: Any) -> Words:
    """Return the words of `share`, uint64 [elements], in the order of the elements.

    Raises:
        PartyError: it is no additive share (or own value) in the 64-bit ring.
    """
    if b"<FM64" not in bytes(share.meta) or b"BShr" in bytes(share.meta):
        raise PartyError(f"a kernel takes additive shares in the 64-bit ring, not {bytes(share.meta)!r}")
    content = b"".join(bytes(chunk)[_start(bytes(chunk)) :] for chunk in share.share_chunks)
    return np.frombuffer(content, "<u8").astype(np.uint64)


def with_words(like: Any, words: Words) -> Any:
    """Return a share of the form of `like`, with other words."""
    content, found, at = words.astype("<u8").tobytes(), [], 0
    for chunk in map(bytes, like.share_chunks):
        start = _start(chunk)
        found.append(chunk[:start] + content[at : at + len(chunk) - start])
        at += len(chunk) - start
    if at != len(content):
        raise PartyError(f"a share of {at // 8} elements cannot hold {words.size}")
    share = type(like)()
    share.meta, share.share_chunks = like.meta, found
    return share


def _start(chunk: bytes) -> int:
    """Where the bytes of a chunk begin: they are its last field."""
    at = 0
    while at < len(chunk):
        tag, at = _number(chunk, at)
        size, at = _number(chunk, at)
        if tag == _CONTENT and at + size == len(chunk):
            return at
        if tag & 7:
            break
    raise PartyError("SPU hands out its shares in a form that this version does not know")


def _number(chunk: bytes, at: int) -> tuple[int, int]:
    """A number of variable length, and where it ends."""
    value = shift = 0
    while at < len(chunk):
        byte = chunk[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            break
    return value, at
