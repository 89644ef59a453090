"""What the parties sent each other, out of a recorded link: brpc's frames, and in them SPU's messages."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_HEAD = struct.Struct("!4sII")
_KEY, _VALUE = 2, 3
_ACKNOWLEDGEMENT = b"ACK"
_AGREEMENT = b"root:"
"""Begins the key of what the parties compare before there is a share."""


def payloads(flow: bytes) -> list[tuple[str, bytes]]:
    """The key and the content of every message that may have shares, in one direction of one connection, in order."""
    found = []
    for frame in _frames(flow):
        fields = dict(_fields(frame))
        key = fields.get(_KEY, b"")
        if key and _VALUE in fields and not key.startswith((_ACKNOWLEDGEMENT, _AGREEMENT)):
            found.append((key.decode(errors="replace"), fields[_VALUE]))
    return found


def unasked(flow: bytes, count: int, size: int) -> bytes:
    """Frames with `count` messages of `size` bytes that nobody waits for, made after one in a recorded `flow`."""
    at = flow.find(b"PRPC")
    while True:
        _, length, head = _HEAD.unpack_from(flow, at)
        about = flow[at + _HEAD.size : at + _HEAD.size + head]
        fields = dict(_fields(flow[at + _HEAD.size + head : at + _HEAD.size + length]))
        if _KEY in fields and _VALUE in fields:
            break
        at += _HEAD.size + length
    first = flow[at + _HEAD.size + head : at + _HEAD.size + length]
    begin = first[: first.index(fields[_KEY]) - 2]  # the sender, before a tag and a length of one byte
    found = bytearray()
    for number in range(count):
        key, value = f"nobody:{number}".encode(), bytes(size)
        body = begin + _field(_KEY, key) + _field(_VALUE, value)
        found += _HEAD.pack(b"PRPC", len(about) + len(body), len(about)) + about + body
    return bytes(found)


def _field(number: int, content: bytes) -> bytes:
    size, count = bytearray(), len(content)
    while count > 127:
        size.append(count & 127 | 128)
        count >>= 7
    return bytes([number << 3 | 2, *size, count]) + content


def _frames(flow: bytes) -> Iterator[bytes]:
    """The bodies of the frames that a stream holds whole, from the first on."""
    at = flow.find(b"PRPC")
    while at >= 0 and at + _HEAD.size <= len(flow):
        magic, size, head = _HEAD.unpack_from(flow, at)
        assert magic == b"PRPC"
        at += _HEAD.size
        if at + size <= len(flow):
            yield flow[at + head : at + size]
        at += size


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The numbers and contents of a protobuf message's fields of bytes; numbers are passed over."""
    at = 0
    while at < len(message):
        tag, at = _number(message, at)
        size, at = _number(message, at)
        if tag & 7 == 2:
            yield tag >> 3, message[at : at + size]
            at += size
        else:
            assert tag & 7 == 0


def _number(message: bytes, at: int) -> tuple[int, int]:
    found = shift = 0
    while True:
        byte = message[at]
        found, at, shift = found | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return found, at
