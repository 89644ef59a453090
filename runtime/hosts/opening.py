"""Opening what a run ends with: one bit of the private checks to both, then the logits to the client alone.

The bit comes first: each party sends its share of it to the other, and goes on only if no value left its range. Of the
logits the server sends its share, the client sends nothing.

The client takes from the server what has the form of its own share and opens to numbers that the ring can hold. A
share that somebody replaced or that belongs to another run opens to numbers all over the ring: of 64 bits, with 18
fraction bits, one in a million would pass.
"""

from __future__ import annotations

import math
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
    """Send this party's `share`, the server's of the logits to the client; returns its bytes."""
    parts = [share.meta, *share.share_chunks]
    link.send(to, str(len(parts)))
    for part in parts:
        link.send(to, part)
    return sum(map(len, parts))


def check_guard(link: Any, share: Any, io: Any, rank: int) -> tuple[int, int]:
    """Open the bit of the private checks to both parties, each with its own `share`.

    Returns:
        The bytes sent and received.

    Raises:
        OutOfRangeError: a value left its range; both parties raise it.
        PartyError: what came is no share of a bit.
    """
    sent = send_share(link, share, to=1 - rank)
    peer = type(share)()
    own = [bytes(share.meta), *map(bytes, share.share_chunks)]
    peer.meta, *peer.share_chunks = parts = _received(link, own, 1 - rank, "the range check")
    opened = np.asarray(io.reconstruct([peer, share] if rank == CLIENT else [share, peer]), dtype=np.float32)
    bit = float(opened.reshape(-1)[0]) if opened.size == 1 else math.nan
    if abs(bit) < _ROUNDING:
        return sent, sum(map(len, parts))
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
    peer = type(share)()
    own = [bytes(share.meta), *map(bytes, share.share_chunks)]
    peer.meta, *peer.share_chunks = parts = _received(link, own, SERVER, "the logits")
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
    return sum(map(len, parts)), logits


def _received(link: Any, own: list[bytes], sender: int, what: str) -> list[bytes]:
    """Receive the parts of the peer's share, which are as many, as long and described as this party's `own`."""
    name = _NAMES[sender]
    said = bytes(link.recv(sender))
    if said != str(len(own)).encode():
        raise PartyError(f"the {name}'s share of {what} should come in {len(own)} parts; it announced {said[:20]!r}")
    parts = []
    for at, mine in enumerate(own):
        part = bytes(link.recv(sender))
        if len(part) != len(mine) or (at == 0 and part != mine):
            raise PartyError(
                f"part {at + 1} of {len(own)} of the {name}'s share of {what} ({len(part):,} bytes) does not fit "
                f"the {_NAMES[1 - sender]}'s share ({len(mine):,} bytes)"
            )
        parts.append(part)
    return parts
