"""Two ends of a TLS connection in memory."""

from __future__ import annotations

import ssl

from aero_compile.runtime import TLSConfig


def shake_hands(server: TLSConfig, client: TLSConfig, host: str) -> dict[str, object]:
    """Connect two ends in memory as two hosts do; returns the client's certificate as the server sees it."""
    contexts = [end.context(called) for called, end in ((True, server), (False, client))]
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    called = contexts[0].wrap_bio(there, back, server_side=True)
    dialled = contexts[1].wrap_bio(back, there, server_hostname=host)
    for end in (dialled, called, dialled, called):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    dialled.write(b"hello")
    assert called.read(5) == b"hello"
    return dict(called.getpeercert() or {})
