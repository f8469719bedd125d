"""Each attempt of a call is a CLIENT span of its own, and the parent of what its server did."""

import asyncio

import pytest

from oriel_gateway.core import Gateway
from oriel_wire.observe.trace import ListSink, Span

from ..waiting import until
from .endpoint_pools import FULL, HEDGED, first_route
from .gate import INFER, idle
from .grpc_endpoints import CODE, Fails, house, never
from .stack import Client, Seen, Upstream, documents, gateway, upstream

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
REFUSED = b"HTTP/1.1 503 No\r\ncontent-length: %d\r\n\r\n%b" % (len(FULL), FULL)
STATUS, RESENT, ERROR = "http.response.status_code", "http.request.resend_count", "error.type"


def hops(core: Gateway) -> list[Span]:
    """Return the attempts in the order in which they were sent."""
    assert isinstance(core.sink, ListSink)
    return [span for span in core.sink.spans if span.kind == "client"]


def told(span: Span) -> dict[str, object]:
    return {name: span.attributes[name] for name in (STATUS, RESENT, ERROR) if name in span.attributes}


def parent(traceparent: str | None) -> int:
    """Return the span that a server was told is its parent."""
    return int((traceparent or "").split("-")[2], 16)


def outstanding(core: Gateway) -> int:
    return sum(endpoint.outstanding for endpoint in core.pools["p"].endpoints)


class Two:
    """Two servers. The first request is answered by `first`, the second one by `second`.

    seen: the server of each request, and the request.
    """

    def __init__(self, first: bytes, second: bytes) -> None:
        self.seen: list[tuple[Upstream, Seen]] = []
        self._answers = [first, second]
        self.go = [asyncio.Event(), asyncio.Event()]

    def at(self, up: Upstream) -> None:
        async def answer(seen: Seen) -> bytes:
            number = len(self.seen)
            self.seen.append((up, seen))
            await self.go[number].wait()
            return self._answers[number]

        up.answer = answer


@pytest.mark.parametrize(
    ("answers", "first", "second"),
    [
        ((b"", OK), {}, {STATUS: 200, RESENT: 1}),
        ((OK, b""), {STATUS: 200}, {RESENT: 1}),
        ((OK, REFUSED), {STATUS: 200}, {STATUS: 503, RESENT: 1, ERROR: "503"}),
    ],
    ids=["the copy is first", "the copy is dropped", "the copy is refused"],
)
async def test_both_copies_of_a_hedged_call_have_spans_of_their_own(
    answers: tuple[bytes, bytes], first: dict[str, object], second: dict[str, object]
) -> None:
    """Both had the same span, so that one server's work hung below the call of the other."""
    two = Two(*answers)
    async with upstream() as a, upstream() as b:
        two.at(a)
        two.at(b)
        async with gateway(first_route(documents([a.port, b.port]), HEDGED)) as (port, core), Client(port) as client:
            client.send(INFER, b"x")
            await until(lambda: len(two.seen) == 2)
            if answers[1]:
                two.go[1].set()
                await until(lambda: not answers[0] or outstanding(core) == 1)
            if answers[0]:
                two.go[0].set()
            assert (await client.reply()).status == 200
            found = hops(core)
            assert [span.attributes["server.port"] for span in found] == [up.port for up, _ in two.seen]
            assert [span.context.span_id for span in found] == [parent(seen.get("traceparent")) for _, seen in two.seen]
            assert len({span.context.span_id for span in found}) == 2
            assert [told(span) for span in found] == [first, second]
            assert [span.failed for span in found] == [ERROR in first, ERROR in second]


async def test_both_copies_end_with_a_client_that_leaves_and_are_in_its_trace() -> None:
    two = Two(b"", b"")
    async with upstream() as a, upstream() as b:
        two.at(a)
        two.at(b)
        async with gateway(first_route(documents([a.port, b.port]), HEDGED)) as (port, core):
            async with Client(port) as client:
                client.send(INFER, b"x")
                await until(lambda: len(two.seen) == 2)
            await until(lambda: not outstanding(core) and idle(core))
            found = hops(core)
            assert [span.context.span_id for span in found] == [parent(seen.get("traceparent")) for _, seen in two.seen]
            assert not any(span.failed for span in found)


@pytest.mark.parametrize(
    ("second", "codes"),
    [(None, ["CANCELLED", "OK"]), (Fails(CODE.UNAVAILABLE, "full"), ["OK", "UNAVAILABLE"])],
    ids=["the copy is first", "the copy is refused"],
)
async def test_both_copies_of_a_hedged_grpc_call_have_spans_of_their_own(
    second: Fails | None, codes: list[str]
) -> None:
    async with house("idempotent = true\nhedge_ms = 20") as it:

        async def late() -> None:
            """Answer the first copy after the second one has been answered."""
            await until(lambda: len(it.asked) == 2 and sum(each.outstanding for each in it.these) == 1)

        it.steps[:] = [never if second is None else late, second]
        assert await it.infer() == "OK"
        found = hops(it.core)
        assert [span.context.span_id for span in found] == [parent(each.traceparent) for each in it.asked]
        assert [span.attributes["rpc.status_code"] for span in found] == codes
        assert len({span.context.span_id for span in found}) == 2


async def test_a_request_that_is_sent_again_on_a_new_connection_is_another_attempt() -> None:
    """A kept connection that ends before its server has read the request: both attempts had one span."""
    async with upstream() as up, gateway(documents([up.port])) as (port, core), Client(port) as client:
        assert (await client.ask(INFER, b"one")).status == 200
        (kept,) = core.pools["p"].endpoints[0].idle
        answer = up.answer

        async def unread(seen: Seen) -> bytes:
            up.answer = answer
            kept._unread = True  # as if the kernel of its server had not taken it
            kept.transport.abort()
            await asyncio.Event().wait()
            return b""

        up.answer = unread
        assert (await client.ask(INFER, b"two")).status == 200
        found = hops(core)
        assert [span.context.span_id for span in found] == [parent(seen.get("traceparent")) for seen in up.seen]
        assert [told(span) for span in found[1:]] == [{ERROR: "upstream_broken"}, {STATUS: 200, RESENT: 1}]
        assert len({span.context.span_id for span in found}) == 3
