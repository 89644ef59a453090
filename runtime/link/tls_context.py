"""TLS of both ends: 1.3 alone, a certificate of one authority at either end, none that was revoked.

It needs the standard library alone, since the process of `tunnel` loads nothing else.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ListError(OSError):
    """The list of revoked certificates is missing or malformed."""


class ExposedKeyError(OSError):
    """Users other than the owner can read or write a key."""


def check_list(path: str) -> None:
    """Refuse a file that does not hold one list of revoked certificates in PEM, and nothing else.

    A certificate in it would be trusted as that of an authority.

    Raises:
        ListError: what is wrong.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ListError(f"{path}: the list of revoked certificates cannot be read: {error.strerror}") from error
    if content.count(b"-----BEGIN ") != 1 or b"-----BEGIN X509 CRL-----" not in content:
        raise ListError(f"{path}: it does not hold one list of revoked certificates (X509 CRL in PEM)")


def tls_context(server_side: bool, certificate: str, key: str, ca: str, revoked: str | None = None) -> ssl.SSLContext:
    """Return a context in which both ends must show a certificate of the authority `ca`, on TLS 1.3.

    `revoked`: a list of that authority, which must not have the peer's certificate; None: none is checked.

    Raises:
        OSError: a file cannot be read (`ssl.SSLError`: or holds something else, or the key is of another one).
        ExposedKeyError, ListError: as the names say.
        ValueError: the key needs a passphrase.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if server_side:
        context.num_tickets = 0  # nobody resumes: each connection shows its certificate
    else:
        context.hostname_checks_common_name = False
    context.load_verify_locations(ca)
    if revoked is not None:
        check_list(revoked)
        try:
            context.load_verify_locations(revoked)
        except ssl.SSLError as error:
            raise ListError(f"{revoked}: the list of revoked certificates is damaged: {error.reason}") from error
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF  # without a list of `ca`, no certificate is accepted
    if os.stat(key).st_mode & 0o077:
        raise ExposedKeyError(f"{key} is open to other users: chmod 600 {key}")
    context.load_cert_chain(certificate, key, _no_passphrase)
    return context


def _no_passphrase() -> str:  # OpenSSL would ask at the terminal
    raise ValueError("the key is encrypted")


def certifies(certificate: Mapping[str, Any], host: str) -> bool:
    """Whether a certificate, as `getpeercert` gives it, names `host` among its alternative names (RFC 9525).

    OpenSSL checks this for the end that dials; here it is done for the end that is called.
    """
    names = certificate.get("subjectAltName", ())
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        wanted = (host if host.isascii() else host.encode("idna").decode()).lower().rstrip(".").split(".")
        return any(kind == "DNS" and _stands_for(name, wanted) for kind, name in names)
    return any(kind == "IP Address" and ipaddress.ip_address(name.strip()) == address for kind, name in names)


def _stands_for(pattern: str, wanted: list[str]) -> bool:
    """Compare label by label; a first label `*` stands for exactly one, above at least two more."""
    labels = pattern.lower().rstrip(".").split(".")
    if labels[0] == "*" and len(labels) > 2:
        return len(labels) == len(wanted) and labels[1:] == wanted[1:]
    return labels == wanted
