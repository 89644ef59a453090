"""Opening the logits to the client alone: the server sends its share, the client sends nothing.

The client takes from the server what has the form of its own share and opens to numbers that the ring can hold. A
share that somebody replaced or that belongs to another run opens to numbers all over the ring: of 64 bits, with 18
fraction bits, one in a million would pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aero_compile.errors import PartyError
from aero_compile.runtime.program import CLIENT, SERVER, Program
from aero_compile.runtime.spu_config import largest_value


def send_share(link: Any, share: Any) -> int:
    """Send the server's ``share`` of the logits to the client; returns its bytes."""
    parts = [share.meta, *share.share_chunks]
    link.send(CLIENT, str(len(parts)))
    for part in parts:
        link.send(CLIENT, part)
    return sum(map(len, parts))


def open_logits(link: Any, share: Any, io: Any, program: Program) -> tuple[int, npt.NDArray[np.float32]]:
    """Receive the server's share and open the logits with the client's own ``share``.

    Returns:
        The bytes of the server's share, and the logits, float32 of the program's shape.

    Raises:
        PartyError: what came is no share of these logits, or opens to numbers that the ring cannot hold.
    """
    peer = type(share)()
    peer.meta, *peer.share_chunks = parts = _received(link, [bytes(share.meta), *map(bytes, share.share_chunks)])
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


def _received(link: Any, own: list[bytes]) -> list[bytes]:
    """Receive the parts of the server's share, which are as many, as long and described as the client's ``own``."""
    said = bytes(link.recv(SERVER))
    if said != str(len(own)).encode():
        raise PartyError(
            f"the server's share of the logits should come in {len(own)} parts; it announced {said[:20]!r}"
        )
    parts = []
    for at, mine in enumerate(own):
        part = bytes(link.recv(SERVER))
        if len(part) != len(mine) or (at == 0 and part != mine):
            raise PartyError(
                f"part {at + 1} of {len(own)} of the server's share of the logits ({len(part):,} bytes) does not fit "
                f"the client's share ({len(mine):,} bytes)"
            )
        parts.append(part)
    return parts
