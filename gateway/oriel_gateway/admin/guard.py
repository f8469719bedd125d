"""Restrict the admin port: probes and scrapes are open to all callers, other pages need the operator's token.

The token is required if there is one. Without one, the pages are open to callers on this machine that use a loopback
address, but not through a proxy that says so: who its caller is cannot be known. A port bound wider than loopback needs
a token, or the explicit statement that no one else needs the pages: in a pod, probes and scrapes come from elsewhere
and people use a forwarded port.
"""

import os
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from hmac import compare_digest
from pathlib import Path
from typing import Any

from oriel_wire.engine.peers import is_loopback, page_refusal
from oriel_wire.errors import StartFailed
from oriel_wire.process.environment import take_secret

TOKEN_VARIABLE = "ORIEL_ADMIN_TOKEN"
TOKEN_FILE_VARIABLE = "ORIEL_ADMIN_TOKEN_FILE"
MIN_TOKEN = 16
MAX_TOKEN = 4096
# Besides probes and scrapes, the console's files, which hold no data.
_OPEN = frozenset(
    {"/health/live", "/health/ready", "/metrics", "/console", "/console/console.js", "/console/console.css"}
)

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_PROXIED = frozenset({"forwarded", "via", "x-real-ip"})
_PROXIED_BEGIN = ("x-forwarded-", "x-envoy-", "x-original-")

_REFUSAL = (
    b'{"error":{"message":"this page needs the admin token: send authorization: Bearer TOKEN; where there is none, '
    b'ask for it from that machine by a loopback address",'
    b'"reason":"unauthenticated"}}'
)


def admin_token(host: str, *, pages: str = "token") -> str | None:
    """Return the token of the environment, or of the file that it names; None without one. Raises StartFailed.

    pages: "loopback" allows a port that others can reach to have no token.
    """
    token = take_secret(TOKEN_VARIABLE)
    path = os.environ.get(TOKEN_FILE_VARIABLE, "")
    if path and not token:
        try:
            with Path(path).open(encoding="ascii") as file:
                token = file.read(MAX_TOKEN + 1).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise StartFailed(f"the file that {TOKEN_FILE_VARIABLE} names cannot be read as text") from error
        if not token:
            raise StartFailed(f"the file that {TOKEN_FILE_VARIABLE} names is empty")
    if not token:
        if pages == "loopback" or is_loopback(host):
            return None
        raise StartFailed(
            f"the admin port on {host} is open to others: set {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE}, "
            "or pass --admin-pages loopback, or --admin-host 127.0.0.1"
        )
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN or not token.isascii():
        raise StartFailed(f"the admin token must have {MIN_TOKEN} to {MAX_TOKEN} ASCII characters")
    return token


class Guard:
    """An ASGI application that guards another one. app: the guarded one."""

    def __init__(self, app: App, token: str | None) -> None:
        self.app = app
        self._expected = None if token is None else b"Bearer " + token.encode("ascii")

    def _may(self, headers: Iterable[tuple[bytes, bytes]], client: tuple[str, int] | None) -> bool:
        if self._expected is None:
            named = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
            # A proxy on this machine, such as a sidecar, connects from here whoever its caller is.
            proxied = any(name in _PROXIED or name.startswith(_PROXIED_BEGIN) for name in named)
            return client is not None and is_loopback(client[0]) and not proxied and not page_refusal(named.get)
        sent = [value for name, value in headers if name == b"authorization"]
        return len(sent) == 1 and compare_digest(sent[0], self._expected)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            if not self._may(scope["headers"], scope.get("client")):
                headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
                headers.append((b"content-length", b"%d" % len(_REFUSAL)))
                await send({"type": "http.response.start", "status": 401, "headers": headers})
                await send({"type": "http.response.body", "body": _REFUSAL})
                return
        await self.app(scope, receive, send)
