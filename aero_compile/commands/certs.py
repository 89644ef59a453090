"""Make an authority and the certificates of a server and its clients, for mutual TLS between two hosts.

Into DIR go NAME.pem and NAME.key of authority, server and each client, and revoked.pem, the list of revoked
certificates; keys can be read by their owner alone. Nothing that is there is replaced. Without --host, more clients are
signed by the authority that DIR has. --renew gives a certificate a new key and a new life, --revoke ends one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from aero_compile.commands.options import positive
from aero_compile.errors import InputError

SUMMARY = "an authority and certificates of server and clients, for TLS between two hosts"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add = parser.add_argument
    add("dir", metavar="DIR", type=Path, help="folder to write to, of mode 0700")
    add(
        "--host", nargs="+", default=[], metavar="NAME", help="names and IP addresses by which clients reach the server"
    )
    text = "clients to make certificates for, which name them so (default: client)"
    add("--client", nargs="+", metavar="NAME", help=text)
    add("--days", type=positive, default=365, metavar="N", help="days that they hold (default: %(default)s)")
    text = "replace key and certificate by new ones of the same names; the certificate before is kept, and holds on"
    add("--renew", nargs="+", metavar="NAME", help=text)
    text = (
        "add certificates to the list of revoked ones, which server and clients need anew; without a NAME the list is "
        "signed again, or made where there is none"
    )
    add("--revoke", nargs="*", metavar="NAME", help=text)


def run(args: argparse.Namespace) -> int:
    """Make, renew or revoke certificates, and say which file goes where."""
    from aero_compile.runtime.link.certificate_changes import renew_certificates, revoke_certificates
    from aero_compile.runtime.link.certificates import AUTHORITY, SERVER, make_certificates
    from aero_compile.runtime.link.revocation import REVOKED

    asked = [args.host or args.client, args.renew, args.revoke is not None]
    if sum(map(bool, asked)) > 1:
        raise InputError("certs makes, renews or revokes: give --host and --client, or --renew, or --revoke")
    if args.revoke is not None:
        revoke_certificates(args.dir, args.revoke)
        print(
            f"to all:         {args.dir}/{REVOKED}, in place of the one that they have (serve, chat, proxy --revoked)"
        )
        return 0
    if args.renew:
        for name, kept in zip(args.renew, renew_certificates(args.dir, args.renew, args.days), strict=True):
            print(f"to {name + ':':<12} {args.dir}/{name}.pem {args.dir}/{name}.key")
            print(f"                once they are there, --revoke {kept} ends the certificate before")
        return 0
    clients = args.client or ["client"]
    make_certificates(args.dir, args.host, clients, args.days)
    for name in ([SERVER] if args.host else []) + clients:
        files = (f"{args.dir}/{file}" for file in (f"{AUTHORITY}.pem", REVOKED, f"{name}.pem", f"{name}.key"))
        print(f"to {name + ':':<12} {' '.join(files)}")
    print(f"to nobody:      {args.dir}/{AUTHORITY}.key, which can sign for others; keep it off both hosts")
    return 0
