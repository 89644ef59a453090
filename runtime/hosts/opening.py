"""Opening what a run ends with: one bit of the private checks to both, then the logits to the client alone.

The bit comes first: each party sends its share of it to the other, and goes on only if no value left its range. Of the
logits the server sends its share, the client sends nothing.

The client takes from the server what has the form of its own share and opens to numbers that the ring can hold. A
share that somebody replaced or that belongs to another run opens to numbers all over the ring: of 64 bits, with 18
fraction bits, one in a million would pass.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from aero_compile.errors import OutOfRangeError, PartyError
from aero_compile.runtime.program import Program
from aero_compile.runtime.roles import CLIENT, SERVER
from aero_compile.runtime.spu_config import largest_value

_NAMES = {SERVER: "server", CLIENT: "client"}
_ROUNDING = 2.0**-8


OUT_OF_RANGE = (
    "on these tokens a value left the range on which the computation holds, and the logits would have been wrong: none "
    "are opened. Which value it was is hidden; give such text to compile_model as calibration=, which names it"
)


def send_share(link: Any, share: Any, to: int = CLIENT) -> int:
    """Send this party's `share`, the server's of the logits to the client, in one message; returns its bytes."""
    content = b"".join(map(bytes, (share.meta, *share.share_chunks)))
    link.send_async(to, content)
    return len(content)


def check_guard(link: Any, share: Any, io: Any, rank: int) -> tuple[int, int]:
    """Open the bit of the private checks to both parties, each with its own `share`.

    Returns:
        The bytes sent and received.

    Raises:
        OutOfRangeError: a value left its range; both parties raise it.
        PartyError: what came is no share of a bit.
    """
    sent = send_share(link, share, to=1 - rank)
    peer, received = _received(link, share, 1 - rank, "the range check")
    opened = np.asarray(io.reconstruct([peer, share] if rank == CLIENT else [share, peer]), dtype=np.float32)
    bit = float(opened.reshape(-1)[0]) if opened.size == 1 else math.nan
    if abs(bit) < _ROUNDING:
        return sent, received
    if abs(bit - 1.0) < _ROUNDING:
        raise OutOfRangeError(OUT_OF_RANGE)
    raise PartyError(f"the range check opens to {opened.tolist()}, which is no bit: the other party's share is wrong")


def open_logits(link: Any, share: Any, io: Any, program: Program) -> tuple[int, npt.NDArray[np.float32]]:
    """Receive the server's share and open the logits with the client's own `share`.

    Returns:
        The bytes of the server's share, and the logits, float32 of the program's shape.

    Raises:
        PartyError: what came is no share of these logits, or opens to numbers that the ring cannot hold.
    """
    peer, received = _received(link, share, SERVER, "the logits")
    logits = np.asarray(io.reconstruct([peer, share]), dtype=np.float32)
    if logits.shape != program.logits.shape:
        raise PartyError(f"the logits have shape {logits.shape}, expected {program.logits.shape}")
    limit = largest_value(program.field, program.fraction_bits)
    largest = float(np.abs(logits).max(initial=0.0))
    if not largest <= limit:
        raise PartyError(
            f"the logits open to numbers up to {largest:.4g}, and the ring holds none above {limit:.4g}: the server's "
            "share is a wrong one, or values were too large on the way (check them with calibration=); no logits are "
            "written"
        )
    return received, logits


def _received(link: Any, share: Any, sender: int, what: str) -> tuple[Any, int]:
    """Receive the peer's share, of the parts, lengths and description of this party's `share`; and its bytes."""
    own = [bytes(share.meta), *map(bytes, share.share_chunks)]
    content = bytes(link.recv(sender))
    if len(content) != sum(map(len, own)) or not content.startswith(own[0]):
        raise PartyError(
            f"the {_NAMES[sender]}'s share of {what} ({len(content):,} bytes) does not fit the "
            f"{_NAMES[1 - sender]}'s share ({sum(map(len, own)):,} bytes)"
        )
    ends = list(accumulate(map(len, own)))
    peer = type(share)()
    peer.meta, *peer.share_chunks = (content[end - len(part) : end] for end, part in zip(ends, own, strict=True))
    return peer, len(content)
