"""The view of a request that HTTP/1.1 and HTTP/2 share: both read the same head and write the same answers."""

from abc import abstractmethod

from oriel_gateway.call.contracts import Client
from oriel_gateway.call.cors import cors_lines, is_preflight
from oriel_gateway.call.http import HTTP
from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.identity.named_models import judge_head
from oriel_gateway.ingress.forwarded import forwarded_for
from oriel_gateway.ingress.judging import NO_MARK, View
from oriel_gateway.ingress.own_answers import is_own, own_page, page_answer, preflight_answer, unpaid_bytes
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import ApiKey
from oriel_wire.engine.listener import HttpServer
from oriel_wire.h1.request import RequestHead

__all__ = ["HttpView"]


class HttpView(View):
    """An HTTP request. head: its head; None until it is read. client: the waiting client; None once it has left."""

    __slots__ = ()

    def __init__(self, gateway: Gateway, client: Client | None, received_s: float) -> None:
        super().__init__(gateway, client, NO_MARK, received_s, HTTP)

    def note_head(self, head: RequestHead, received_s: float, now_s: float) -> None:
        """Note the head of the request. received_s, now_s: monotonic seconds of its arrival and of now."""
        self.head, self.known = head, head.decision
        self.received_s, self.now_s = received_s, now_s
        self.timeout_ms = head.timeout
        self.size_bytes = head.content_length or 0
        self.mark = self.gateway.marks.of(head.request_id, head.traceparent, head.tracestate)

    # The connection's part -------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def server(self) -> HttpServer:
        """The listener that the request came to."""

    @property
    @abstractmethod
    def must_close(self) -> bool:
        """Return whether the answer ends the connection."""

    @property
    @abstractmethod
    def peer(self) -> str:
        """The address that the request came from."""

    @abstractmethod
    def note_front(self, cors: bytes, forwarded: str) -> None:
        """Note header lines: `cors` for the answer, `forwarded` for the next hop."""

    @abstractmethod
    def count_unpaid(self, size: int) -> None:
        """Count a request that anybody may send, and `size` bytes of its answer."""

    @abstractmethod
    def write_own(self, answer: bytes) -> None:
        """Write a whole answer of the gateway's own, made for HTTP/1.1, with the lines for browsers."""

    # The order of judging --------------------------------------------------------------------------------------

    @property
    def method(self) -> str:
        return "" if self.head is None else self.head.line.method

    def fronted(self) -> bool:
        """Read what browsers and proxies report about the client; True: it was a preflight and is answered."""
        head, snapshot, server = self.head, self.gateway.snapshot, self.server
        assert head is not None
        http = snapshot.http
        networks, forwarded, cors = http.trusted_proxies, "", b""
        if networks:
            _, forwarded = forwarded_for(head, self.peer, secure=server.secure, networks=networks)
        if http.cors_origins:
            cors = cors_lines(head.get("origin"), http.cors_origins)
        self.note_front(cors, forwarded)
        if not http.cors_origins or not is_preflight(head):
            return False
        self.count_unpaid(0)
        close = self.must_close
        self.write_own(preflight_answer(cors, snapshot, head, self.mark, server.date_line, close=close))
        return True

    def answers_itself(self) -> bool:
        head, server = self.head, self.server
        assert head is not None
        if not is_own(head.line.method, head.line.path):
            return False
        page = own_page(head, self.gateway, server.memo)
        self.count_unpaid(unpaid_bytes(head, page))
        self.write_own(page_answer(page, head, self.mark, server.date_line, close=self.must_close))
        return True

    def identify(self) -> ApiKey:
        return self.gateway.callers.identify(self.head.credentials, self.server.memo)

    def find(self, key: ApiKey) -> Target | None:
        line, tier = self.head.line, self.head.tier
        return self.gateway.targets.of_line(key.tenant, line.line, line.method, line.path, line.query, tier)

    def header(self, name: str) -> str | None:
        head: RequestHead = self.head
        return head.get(name)

    def fits(self, gate: PoolGate, target: Target) -> None:
        head, bound = self.head, gate.pool.max_body_bytes
        assert head is not None
        if target.names:
            judge_head(head, target.names)
        if target.plan.engines:
            encodings = [value.strip().lower() for name, value in head.sent_on() if name == "content-encoding"]
            if not {"", "identity"}.issuperset(encodings):
                message = "send the body without a content encoding: the engine's priority is written into it"
                raise Refused(Outcome.ENCODING_UNSUPPORTED, message)
        if self.size_bytes > bound:
            raise Refused(Outcome.TOO_LARGE, f"the body is larger than {bound} bytes")

    @property
    def v2(self) -> bool:
        """Return whether errors are written as v2 clients read them, which cannot read an object."""
        return self.head is None or self.head.line.path.startswith("/v2")
