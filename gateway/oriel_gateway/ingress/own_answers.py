"""Answers to HTTP requests that do not become calls: health, documentation pages, CORS preflights."""

from oriel_gateway.api_docs.document import SERVICES
from oriel_gateway.api_docs.pages import KEYED, PATHS, Page
from oriel_gateway.call.answers import small_answer
from oriel_gateway.call.cors import preflight_lines
from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.ingress.own_use import PATHS as OF_TENANTS
from oriel_gateway.ingress.own_use import use_page
from oriel_gateway.observe.tracing import Mark
from oriel_policies.documents import Snapshot
from oriel_wire.h1.request import LineMemo, RequestHead

__all__ = ["NOT_QUEUED", "is_own", "own_page", "page_answer", "preflight_answer", "unpaid_bytes"]

NOT_QUEUED = "gateway-queue;dur=0.000"
_HEALTH = "/v2/health/"


def is_own(method: str, path: str) -> bool:
    """Return whether the gateway itself answers this request."""
    return path.startswith(_HEALTH) or path in PATHS or path in OF_TENANTS or (method == "OPTIONS" and path != "*")


def unpaid_bytes(head: RequestHead, page: Page) -> int:
    """Return the bytes of a page that go to a sender who may be anybody; 0 for a tenant, whose pages are counted."""
    path = head.line.path
    return 0 if head.credentials and (path in KEYED or path in OF_TENANTS) else len(page.body)


def own_page(head: RequestHead, gateway: Gateway, memo: LineMemo) -> Page:
    """Return the gateway's answer at a path of its own. Raises Refused."""
    path, method = head.line.path, head.line.method
    hidden = memo is gateway.callers.internal  # a ticket is for models, not for what its tenant may read
    if method == "OPTIONS" and not hidden:
        raise Refused(Outcome.METHOD_NOT_ALLOWED, _options(gateway.snapshot), headers=(("allow", "GET, HEAD, POST"),))
    if path not in ("/v2/health/live", "/v2/health/ready") and (hidden or path.startswith(_HEALTH)):
        raise Refused(Outcome.NOT_FOUND, "nothing is served at this path")
    if method not in ("GET", "HEAD"):
        allow = (("allow", "GET, HEAD"),)
        raise Refused(Outcome.METHOD_NOT_ALLOWED, f"this path takes GET, HEAD, not {method}", headers=allow)
    if path in OF_TENANTS:
        tenant = gateway.callers.identify(head.credentials, memo).tenant
        gateway.others.count(tenant)
        return use_page(path, tenant, gateway)
    if not path.startswith(_HEALTH):
        return _documentation(head, gateway, memo)
    # Without a key: load balancers have none.
    if path == "/v2/health/ready" and not gateway.ready:
        why = "it is shutting down" if gateway.draining else "it has not yet asked its upstreams"
        raise Refused(Outcome.NOT_READY, f"the gateway is not ready: {why}", retry_after_s=1)
    return Page("", b"", ())


def _options(snapshot: Snapshot) -> str:
    if snapshot.http.cors_origins:
        return "OPTIONS is for browsers: send Origin and Access-Control-Request-Method"
    return "CORS is off: pages of other origins may not call this gateway unless cors_origins in its [http] names them"


def _documentation(head: RequestHead, gateway: Gateway, memo: LineMemo) -> Page:
    """Return a page of the documentation; which services and models it shows depends on the key."""
    path, tenant = head.line.path, None
    if path in KEYED and (head.credentials or path == SERVICES):
        tenant = gateway.callers.identify(head.credentials, memo).tenant
        gateway.others.count(tenant)
    accept = head.get("accept") or ""
    return gateway.api_docs.page(path, accept, tenant, gateway.snapshot, gateway.targets.routes)


def page_answer(page: Page, head: RequestHead, mark: Mark, date_line: bytes, *, close: bool) -> bytes:
    """Return a whole answer of status 200."""
    return small_answer(
        200,
        [*page.headers, *_ids(mark)],
        page.body,
        date_line,
        close=close,
        content_type=page.content_type,
        head_only=head.line.method == "HEAD",
    )


def preflight_answer(
    cors: bytes, snapshot: Snapshot, head: RequestHead, mark: Mark, date_line: bytes, *, close: bool
) -> bytes:
    """Return the whole answer to a preflight. cors: the lines for its origin, which allow it or not."""
    allowed = cors.startswith(b"access-control-")
    lines = preflight_lines(allowed, snapshot, head.get("access-control-request-headers"))
    return small_answer(204, [*lines, *_ids(mark)], b"", date_line, close=close)


def _ids(mark: Mark) -> list[tuple[str, str]]:
    return [
        ("x-request-id", mark.request_id),
        ("traceresponse", mark.traceresponse()),
        ("server-timing", NOT_QUEUED),
    ]
