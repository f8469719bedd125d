"""The console's three static files: compressed once, with an ETag of their content and headers that shut others out.

They hold no data, so they need no token. The page is told only whether data needs one. The script is the files of
`static` and `static/vendor` one after the other, in one function of its own.
"""

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

from oriel_gateway.admin.console.live import whole
from oriel_gateway.admin.guard import App, Receive, Scope, Send

STATIC: Final = Path(__file__).with_name("static")
PAGE, SCRIPT, STYLE = "/console", "/console/console.js", "/console/console.css"
PATHS: Final = (PAGE, SCRIPT, STYLE)
VENDORED: Final = ("htm-preact.js", "uplot.js")
SCRIPTS: Final = ("format.js", "state.js", "table.js", "charts.js", "sections.js", "details.js", "app.js")
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SAFE: Final = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
    (b"vary", b"accept-encoding"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file as it is sent."""

    content_type: bytes
    body: bytes
    compressed: bytes
    etag: bytes

    @classmethod
    def of(cls, content_type: str, body: bytes) -> "File":
        """Compress a file."""
        etag = b'"%b"' % sha256(body).hexdigest()[:32].encode()
        compressed = gzip.compress(body, 9, mtime=0)
        return cls(content_type=content_type.encode(), body=body, compressed=compressed, etag=etag)


@cache
def files(*, token: bool) -> Mapping[str, File]:
    """Return the files by path. token: True if the data needs a token."""
    page = (STATIC / "console.html").read_bytes()
    page = page.replace(b"{token}", b"needed" if token else b"none")
    vendored = [(STATIC / "vendor" / name).read_bytes() for name in VENDORED]
    own = [(STATIC / name).read_bytes() for name in SCRIPTS]
    script = b"\n".join([*vendored, b'(() => {\n"use strict";', *own, b"})();\n"])
    style = (STATIC / "vendor" / "uplot.css").read_bytes() + (STATIC / "console.css").read_bytes()
    return {
        PAGE: File.of("text/html; charset=utf-8", page),
        SCRIPT: File.of("text/javascript; charset=utf-8", script),
        STYLE: File.of("text/css; charset=utf-8", style),
    }


class Pages:
    """The ASGI application of the static files; the caller routes only `PATHS` to it."""

    def __init__(self, *, token: bool) -> None:
        self._files = files(token=token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the file at the path, or 304 if the client has it."""
        found = self._files[scope["path"]]
        headers = [*SAFE, (b"etag", found.etag), (b"content-type", found.content_type)]
        fields = dict(scope["headers"])
        if found.etag in fields.get(b"if-none-match", b""):
            await whole(send, 304, headers, b"")
            return
        body = found.body
        if b"gzip" in fields.get(b"accept-encoding", b""):
            body = found.compressed
            headers.append((b"content-encoding", b"gzip"))
        await whole(send, 200, headers, body)


class OnlyGet:
    """An application of which every method but GET is refused: 405."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a GET on."""
        if scope["method"] != "GET":
            await whole(send, 405, [*SAFE, (b"allow", b"GET"), (b"content-type", b"text/plain")], b"only GET\n")
            return
        await self._app(scope, receive, send)
