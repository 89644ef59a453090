"""An OpenAI-compatible endpoint on this machine, in front of a private session with a server.

Any client of that API can use it: /v1/models, /v1/completions, and /v1/chat/completions where the tokenizer has a
chat template; streamed or whole. Prompts leave this process as secret shares alone. The usage of an answer says what
it cost.
"""

from __future__ import annotations

import argparse
import errno
import socket

from aero_compile.commands.draft import add_draft, draft_of
from aero_compile.commands.link import add_client, open_session
from aero_compile.errors import InputError

SUMMARY = "an OpenAI-compatible endpoint on this machine, private towards the server"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
GRACE_SECONDS = 5
"""For answers that are under way, when the endpoint is to stop."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_client(parser)
    add_draft(parser)
    group = parser.add_argument_group("endpoint")
    group.add_argument("--port", type=int, default=8000, metavar="PORT", help="of the endpoint (default: %(default)s)")
    text = "address to listen at; whoever reaches it can use the session (default: %(default)s)"
    group.add_argument("--host", default=LOOPBACK[0], help=text)
    group.add_argument("--name", default="private", help="what clients call the model (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Answer until interrupted."""
    import uvicorn

    from aero_compile.proxy.app import make_app
    from aero_compile.proxy.writer import Writer
    from aero_compile.training.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(args.tokenizer)
    with _listener(args.host, args.port) as listener:
        writer = Writer(lambda: open_session(args), tokenizer, draft_of(args, tokenizer))
        try:
            writer.open()
            app = make_app(writer, args.name, {*LOOPBACK, args.host})
            port = listener.getsockname()[1]
            print(f"http://{args.host}:{port}/v1 has the model {args.name!r}", flush=True)
            config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_SECONDS)
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            writer.close()
    return 0


def _listener(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        taken = "is in use; choose another --port" if error.errno == errno.EADDRINUSE else f"cannot be: {error}"
        raise InputError(f"{host}:{port} {taken}") from error
    except OverflowError as error:
        raise InputError(f"--port {port} is no port: {error}") from error
