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

Integers = npt.NDArray[np.int64] | npt.NDArray[np.int32]
"""Words as signed integers. Weights usually fit in 32 bits, which take half the memory."""

_CONTENT = 3 << 3 | 2
"""Tag of a chunk's bytes: field 3, length-delimited."""

_STORAGE, _ADDITIVE, _BITS = b"*", b"AShr", b"BShr"
"""In a description: the tag of its last field, which names the form of a share (field 5, length-delimited); forms."""


def read_words(share: Any, ring: int = 64, bits: bool = False) -> Words:
    """Return the words of `share`, uint64 [elements], in the order of the elements; they are not to be written to.

    `ring`: in which it is, of 64 or 32 bits. `bits`: it is one of single bits, which are XORed.

    Raises:
        PartyError: it is another share; without `bits` an additive one, or an own value, is wanted.
    """
    return _read(share, ring, bits).astype(np.uint64, copy=False)


def read_bits(share: Any, ring: int = 64) -> npt.NDArray[np.uint8]:
    """Return the bits of a share of single bits, uint8 [elements]; SEMI2K leaves something in the bits above."""
    whole = _read(share, ring, True)
    found: npt.NDArray[np.uint8] = (whole & whole.dtype.type(1)).astype(np.uint8)
    return found


def _read(share: Any, ring: int, bits: bool) -> npt.NDArray[Any]:
    meta = bytes(share.meta)
    if f"<FM{ring}".encode() not in meta or (_BITS in meta) != bits or (bits and b",1>" not in meta):
        form = "shares of single bits" if bits else "additive shares"
        raise PartyError(f"a kernel takes {form} in the {ring}-bit ring, not {meta!r}")
    # Of a matrix of weights each copy counts: they are read anew by every rehearsal.
    parts = [memoryview(chunk)[_start(chunk) :] for chunk in map(bytes, share.share_chunks)]
    content = parts[0] if len(parts) == 1 else b"".join(parts)
    return np.frombuffer(content, f"<u{ring // 8}")


def narrowed(words: Words) -> Integers:
    """Words as integers: in 32 bits if all fit."""
    whole = words.view(np.int64)
    limits = np.iinfo(np.int32)
    fits = whole.min(initial=0) >= limits.min and whole.max(initial=0) <= limits.max
    return whole.astype(np.int32) if fits else whole


def widened(integers: Words | Integers) -> Words:
    """Integers as words."""
    return (integers.astype(np.int64) if integers.dtype == np.int32 else integers).view(np.uint64)


def as_bits(share: Any, ring: int = 64) -> Any:
    """Return an additive share of booleans in the ring of so many bits as one of single bits, with the same words."""
    meta = bytes(share.meta)
    start = meta.rfind(_STORAGE)
    kind = meta[start + 2 :]
    form = b"<FM%d" % ring
    if start < 0 or meta[start + 1] != len(kind) or not kind.endswith(_ADDITIVE + form + b">"):
        raise PartyError(f"SPU describes booleans in a form that this version does not know: {meta!r}")
    kind = kind.removesuffix(_ADDITIVE + form + b">") + _BITS + form + b",1>"
    found = type(share)()
    found.meta, found.share_chunks = meta[:start] + _STORAGE + bytes([len(kind)]) + kind, share.share_chunks
    return found


def with_words(like: Any, words: npt.NDArray[Any], ring: int = 64) -> Any:
    """Return a share of the form of `like`, in the ring of so many bits, with other words: their lower bits.

    `words`: of any unsigned type.
    """
    content, found, at = words.astype(f"<u{ring // 8}").tobytes(), [], 0
    for chunk in map(bytes, like.share_chunks):
        start = _start(chunk)
        found.append(chunk[:start] + content[at : at + len(chunk) - start])
        at += len(chunk) - start
    if at != len(content):
        raise PartyError(f"a share of {at * 8 // ring} elements cannot hold {words.size}")
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
