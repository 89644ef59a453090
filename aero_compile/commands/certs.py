"""Make an authority and the certificates of a server and its clients, for mutual TLS between two hosts.

Into DIR go NAME.pem and NAME.key of authority, server and each client; keys can be read by their owner alone. Nothing
that is there is replaced. Without --host, more clients are signed by the authority that DIR has.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from aero_compile.commands.options import positive

SUMMARY = "an authority and certificates of server and clients, for TLS between two hosts"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add = parser.add_argument
    add("dir", metavar="DIR", type=Path, help="folder to write to, of mode 0700")
    add(
        "--host", nargs="+", default=[], metavar="NAME", help="names and IP addresses by which clients reach the server"
    )
    text = "clients to make certificates for, which name them so (default: client)"
    add("--client", nargs="+", default=["client"], metavar="NAME", help=text)
    add("--days", type=positive, default=365, metavar="N", help="days that they hold (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Make them, and say which file goes where."""
    from aero_compile.runtime.hosts.certificates import AUTHORITY, SERVER, make_certificates

    make_certificates(args.dir, args.host, args.client, args.days)
    for name in ([SERVER] if args.host else []) + args.client:
        print(f"to {name + ':':<12} {args.dir}/{AUTHORITY}.pem {args.dir}/{name}.pem {args.dir}/{name}.key")
    print(f"to nobody:      {args.dir}/{AUTHORITY}.key, which can sign for others; keep it off both hosts")
    return 0
