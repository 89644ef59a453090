"""Refuses callers without a key, before anything of what they send is read, whatever path they name.

Pages in a browser get nothing either: they have no key, no answer carries a header that lets another origin read it,
and a request must name a host of this endpoint, whatever a name server says.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from aero_compile.errors import InputError
from aero_compile.proxy import answers
from aero_compile.proxy.keys import Keys

CALLER = "aero_compile.caller"
"""The entry of a request's scope that says whose key it came with."""

SOCKET = "socket"
"""The caller at a Unix socket, where the socket's mode says who may call."""

logger = logging.getLogger("aero_compile.proxy")


class Guard:
    """ASGI middleware in front of all routes. `keys`: None where whoever can connect may call."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], keys: Keys | None) -> None:
        self._app, self._keys = app, keys
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request here, or pass it on with its caller."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            refusal = self._refusal(request := Request(scope))
            await (refusal or self._app)(request.scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _refusal(self, request: Request) -> Response | None:
        """Note the caller in the scope; an answer, if the request is refused."""
        try:
            caller = SOCKET if self._keys is None else self._keys.caller(_key(request))
        except InputError as error:
            logger.error("%s; nobody is answered", error)
            content = answers.error("the endpoint's keys cannot be read: see its log", "api_error")
            return JSONResponse(content, 503)
        if caller is None:
            message = "a key is needed: send Authorization: Bearer KEY (api_key=), with a key of aero-compile proxy"
            content = answers.error(message, "invalid_request_error", code="invalid_api_key")
            return JSONResponse(content, 401, headers={"WWW-Authenticate": "Bearer"})
        if (host := _host(request)) not in self._hosts:
            message = f"this endpoint is not called {host or 'so'}"
            return JSONResponse(answers.error(message, "invalid_request_error"), 403)
        request.scope[CALLER] = caller
        return None


def _host(request: Request) -> str:
    """The host that a request names, without its port; empty where it names none, several, or one that cannot be."""
    given = request.headers.getlist("host")
    try:
        return (urlsplit(f"//{given[0]}").hostname or "").lower() if len(given) == 1 else ""
    except ValueError:
        return ""


def _key(request: Request) -> str:
    """The key of a request; empty where it has none, or several."""
    given = request.headers.getlist("authorization")
    scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    return key.strip() if scheme.lower() == "bearer" else ""
