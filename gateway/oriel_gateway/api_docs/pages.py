"""Answer requests for the gateway's own pages, which are built once for each tenant and kept until something
changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from oriel_gateway.api_docs.document import SERVICES, common_document, document, listed
from oriel_gateway.api_docs.published import Published
from oriel_policies.documents import Snapshot, Tenant
from oriel_policies.promise.routing import RouteTable
from oriel_wire.process.api_page import DOCS, HTML, OPENAPI, SAFE, page, policy

ROOT: Final = "/"
PATHS = frozenset({ROOT, DOCS, OPENAPI, SERVICES})
KEYED = frozenset({OPENAPI, SERVICES})  # pages that depend on the key
MAX_KEPT_BYTES = 8 << 20
JSON = "application/json"
START = Path(__file__).with_name("start.html")
LINKS = {
    "docs": DOCS,
    "openapi": OPENAPI,
    "services": SERVICES,
    "openai_models": "/v1/models",
    "v2": "/v2",
    "health": "/v2/health/ready",
}
_PRIVATE = (
    ("cache-control", "private, no-store"),
    ("vary", "authorization, x-api-key"),
    ("x-content-type-options", "nosniff"),
)


@dataclass(frozen=True, slots=True)
class Page:
    """An answer with status 200."""

    content_type: str
    body: bytes
    headers: Sequence[tuple[str, str]]


class ApiDocs:
    """The pages of one gateway. published: the descriptions that the pools reported. Single writer: the loop."""

    def __init__(self) -> None:
        self.published = Published()
        self._kept: dict[tuple[str, Tenant], Page] = {}
        self._kept_bytes = 0
        self.max_kept_bytes = MAX_KEPT_BYTES
        self._of: tuple[Snapshot | None, int] = (None, 0)
        self._common: Page | None = None
        self._start: tuple[Page, Page] | None = None

    def page(self, path: str, accept: str, tenant: Tenant | None, snapshot: Snapshot, routes: RouteTable) -> Page:
        """Return the page at one of `PATHS`. tenant: None for a caller without a key, which `SERVICES` does not
        accept.
        """
        if path == ROOT:
            return self._started()["text/html" not in accept]
        if path == DOCS:
            text, headers = page()
            return Page(HTML, text, headers)
        if tenant is None:
            if self._common is None:
                self._common = Page(JSON, common_document(), _PRIVATE)
            return self._common
        now = snapshot, self.published.changes
        if self._of != now:
            self._of, self._kept, self._kept_bytes = now, {}, 0
        found = self._kept.get((path, tenant))
        if found is None:
            pools = self.published.pools
            if path == SERVICES:
                body = msgspec.json.encode({"services": listed(tenant, routes, pools)})
            else:
                body = document(tenant, routes, pools)
            if self._kept_bytes + len(body) > self.max_kept_bytes:
                self._kept, self._kept_bytes = {}, 0
            found = self._kept[path, tenant] = Page(JSON, body, _PRIVATE)
            self._kept_bytes += len(body)
        return found

    def _started(self) -> tuple[Page, Page]:
        """Build the page at `/` for people and for programs."""
        if self._start is None:
            text = START.read_bytes()
            headers = (*SAFE, ("vary", "accept"))
            links = msgspec.json.encode({"name": "Oriel gateway", "links": LINKS})
            self._start = (
                Page(HTML, text, (*headers, ("content-security-policy", policy(text)))),
                Page(JSON, links, headers),
            )
        return self._start
