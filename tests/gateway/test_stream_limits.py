"""The rules for calls hold for the messages of a gRPC stream: limits, revocation, one spelling of a version."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from grpc import aio
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.limits import Grant, StreamGrant
from oriel_gateway.limits.streams import MAX_MODELS
from oriel_policies.documents import compile_documents
from oriel_policies.waiting.unanswered import Unanswered
from oriel_wire.h2.grpc import CODES

from ..waiting import until
from .grpc_stack import Backend, idle, stack
from .grpc_stream_calls import STREAM, infer
from .limit_desk import Desk
from .raw_grpc import framed, raw_call
from .stack import BRONZE, GOLD, digest, documents


def limited(limits: str) -> Callable[[int], dict[str, bytes]]:
    return lambda port: {
        "all.toml": documents([port])["all.toml"].replace(
            b"[tenants.limited]", f"{limits}\n[tenants.limited]".encode(), 1
        )
    }


async def send(address: str, messages: list[bytes], key: str = BRONZE) -> list[str]:
    async with aio.insecure_channel(address) as channel:
        stream = channel.stream_stream(STREAM, None, None)(iter(messages), metadata=(("x-api-key", key),))
        return [service_pb2.ModelStreamInferResponse.FromString(m).infer_response.model_name async for m in stream]


@pytest.mark.parametrize("shared", [False, True])
async def test_every_message_of_a_stream_counts_for_quotas(shared: bool) -> None:
    backend = Backend()
    files = limited("limit = { requests_per_day = 3, concurrency = 1 }")
    async with stack(backend, files=files, shared=shared) as (address, core), aio.insecure_channel(address) as channel:
        stream = channel.stream_stream(STREAM, None, None)(metadata=(("x-api-key", BRONZE),))
        for _ in range(3):
            await stream.write(infer("digits"))
            assert await stream.read() is not aio.EOF
        await stream.write(infer("digits"))
        with pytest.raises(aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(backend.seen) == 3
        await until(lambda: idle(core))


@pytest.mark.parametrize("shared", [False, True])
async def test_messages_that_are_sent_without_waiting_count_as_well(shared: bool) -> None:
    backend = Backend()
    files = limited("limit = { requests_per_day = 3, concurrency = 1 }")
    async with stack(backend, files=files, shared=shared) as (address, core):
        # All messages at once: a client that is still writing may report its failed write instead of the status.
        answer = await raw_call(address, STREAM, {"x-api-key": BRONZE}, framed(infer("digits")) * 10)
        assert CODES[answer.status] == "RESOURCE_EXHAUSTED"
        # the refusal may arrive before answers to messages that were let through
        assert len(backend.seen) <= 3 and idle(core)


async def test_a_stream_does_not_reach_another_models_limit_unseen() -> None:
    backend = Backend()
    files = limited('limits = [{ model = "big", requests_per_day = 1 }]')
    async with stack(backend, files=lambda p: widen(files(p))) as (address, _):
        sent = framed(infer("digits")) + framed(infer("big")) * 5
        answer = await raw_call(address, STREAM, {"x-api-key": BRONZE}, sent)
        assert CODES[answer.status] == "RESOURCE_EXHAUSTED"
        assert [request.model_name for _, request, _, _ in backend.seen].count("big") <= 1


def widen(files: dict[str, bytes]) -> dict[str, bytes]:
    return {"all.toml": files["all.toml"].replace(b'models = ["digits"]', b'models = ["digits", "big"]')}


@pytest.mark.parametrize("shared", [False, True])
async def test_a_stream_faster_than_its_rate_is_held_back_and_loses_nothing(shared: bool) -> None:
    backend = Backend()
    files = limited("limit = { requests_per_s = 100, burst = 2 }")
    async with stack(backend, files=files, shared=shared) as (address, _):
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert len(await send(address, [infer("digits")] * 12)) == 12
        # ten messages beyond the burst take at least this long; no machine can be too slow
        assert loop.time() - began >= 0.095


async def test_a_key_revoked_while_the_first_message_is_awaited_does_not_count() -> None:
    backend = Backend()
    async with stack(backend) as (address, core), aio.insecure_channel(address) as channel:
        go_on = asyncio.Event()

        async def messages() -> AsyncIterator[bytes]:
            await go_on.wait()
            yield infer("digits")

        call = channel.stream_stream(STREAM, None, None)(messages(), metadata=(("x-api-key", GOLD),))
        await until(lambda: any(front.memo.credentials for front in core.fronts))  # its caller is known
        port = core.pools["p"].pool.grpc_endpoints[0][1]
        files = documents([port])["all.toml"].replace(digest(GOLD).encode(), digest("new").encode())
        core.adopt(compile_documents({"all.toml": files}))
        go_on.set()
        with pytest.raises(aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED and not backend.seen


@pytest.mark.parametrize("version", ["01", "007", "-1", "1 ", "9" * 19, "+1"])
async def test_a_version_has_one_spelling(version: str) -> None:
    """A server reads 01 as 1, so a route for version 1, and its limit, would not apply to it."""
    backend = Backend()
    async with stack(backend) as (address, _):
        with pytest.raises(aio.AioRpcError) as caught:
            await send(address, [infer("digits", version)])
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and not backend.seen


async def refused_after(address: str, messages: list[bytes]) -> tuple[int, str]:
    """Return how many answers came, one after each message, and the reason why no more came."""
    async with aio.insecure_channel(address) as channel:
        stream = channel.stream_stream(STREAM, None, None)(metadata=(("x-api-key", BRONZE),))
        for number, message in enumerate(messages):
            await stream.write(message)
            try:
                if await stream.read() is aio.EOF:
                    return number, "ended"
            except aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                trailing = error.trailing_metadata()
                return number, next(str(value) for key, value in trailing or () if key == "x-oriel-reason")
        await stream.done_writing()
        assert await stream.read() is aio.EOF
        return len(messages), ""


@pytest.mark.parametrize("shared", [False, True])
async def test_a_stream_takes_a_slot_of_another_model_and_gives_it_back(shared: bool) -> None:
    backend = Backend()
    files = limited('limits = [{ model = "big", concurrency = 1 }]')
    async with stack(backend, files=lambda p: widen(files(p)), shared=shared) as (address, _):
        async with aio.insecure_channel(address) as channel:
            first = channel.stream_stream(STREAM, None, None)(metadata=(("x-api-key", BRONZE),))
            for model in ("digits", "big", "digits", "big"):  # one slot is taken, however many messages are sent
                await first.write(infer(model))
                assert await first.read() is not aio.EOF
            other = [infer("digits"), infer("digits"), infer("big"), infer("big")]
            assert await refused_after(address, other) == (2, "concurrency_limited")
            await first.done_writing()
            assert await first.read() is aio.EOF

            async def let_through() -> bool:
                return await refused_after(address, other) == (4, "")

            await until(let_through)  # after a refusal the ledger is not asked again at once
            assert await refused_after(address, [infer("big")]) == (1, "")


@pytest.mark.parametrize("shared", [False, True])
async def test_a_stream_is_held_to_the_computing_of_another_model(shared: bool) -> None:
    backend = Backend()
    backend.cost_us = "2000000"
    files = limited('limits = [{ model = "big", compute_ms_per_day = 1000 }]')
    async with stack(backend, files=lambda p: widen(files(p)), shared=shared) as (address, _):
        async with aio.insecure_channel(address) as channel:
            unary = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, None)
            stream = [infer("digits"), infer("big")]
            assert await refused_after(address, stream * 3) == (6, "")
            await unary(infer("big"), metadata=(("x-api-key", BRONZE),))
            assert await refused_after(address, stream) == (1, "quota_exceeded")
            assert await refused_after(address, stream[:1] * 3) == (3, "")


@pytest.mark.parametrize("shared", [False, True])
async def test_bytes_beyond_the_burst_hold_the_next_message_of_a_stream_back(shared: bool) -> None:
    backend = Backend()
    files = limited('limits = [{ model = "big", bytes_per_s = 20000, bytes_burst = 1000 }]')
    async with stack(backend, files=lambda p: widen(files(p)), shared=shared) as (address, _):
        loop = asyncio.get_running_loop()
        began = loop.time()
        large = service_pb2.ModelInferRequest(model_name="big", raw_input_contents=[bytes(1000)]).SerializeToString()
        assert len(await send(address, [infer("digits"), *[large] * 5])) == 6
        assert loop.time() - began >= 0.18  # four messages beyond the burst take at least this long


def compute_left(desk: Desk, grant: Grant, model: str) -> float:
    (meter,) = [each for each in grant.meters if each.bound.name == f"model:{model}/compute-day"]
    return meter.remaining(desk.now)[0]


def test_a_streams_computing_counts_for_the_models_that_are_at_work() -> None:
    """The computing time of one model is not charged to another, and a cost that a server reports for the stream is
    shared.
    """
    desk = Desk(
        """limits = [
            { model = "small", compute_ms_per_day = 10000 },
            { model = "big", concurrency = 2, compute_ms_per_day = 1000 },
        ]"""
    )
    first = desk.take("small")
    stream = StreamGrant(first, "small", desk.now)
    desk.now += 1.0
    stream.worked(["small"], 1.0, desk.now)  # charged to the small model only

    later = desk.limiter.acquire_further(desk.tenant, desk.target("big"), 0, desk.now, stream.held)
    assert isinstance(later, Grant)
    stream.add_message(later, "big", desk.now)
    stream.message_sent("big", [], desk.now)
    assert compute_left(desk, later, "big") == 990_000.0
    desk.now += 0.5
    stream.worked(["big"], 1.0, desk.now)
    assert compute_left(desk, later, "big") == 490_000.0, "counted while the stream goes on"
    again = desk.limiter.acquire_further(desk.tenant, desk.target("big"), 0, desk.now, stream.held)
    assert isinstance(again, Grant)
    stream.add_message(again, "big", desk.now)
    assert compute_left(desk, later, "big") == 490_000.0, "the estimate for one message is reserved"
    desk.now += 0.5
    stream.worked(["big"], 1.0, desk.now)
    with pytest.raises(Refused) as caught:  # long before the stream ends
        desk.limiter.acquire_further(desk.tenant, desk.target("big"), 0, desk.now, stream.held)
    assert caught.value.outcome is Outcome.QUOTA_EXCEEDED

    small, big = list(first.meters), list(later.meters)
    stream.settle(800_000, desk.now)  # the cost that the server reports for two seconds
    (slots,) = [meter for meter in big if meter.bound.slots]
    assert slots.remaining(desk.now)[0] == 2
    assert [meter.remaining(desk.now)[0] for meter in big if not meter.bound.slots] == [600_000.0]
    assert [meter.remaining(desk.now)[0] for meter in small] == [9_600_000.0]


BOTH = """limits = [
    { model = "small", compute_ms_per_day = 1000000, bytes_per_s = 1000, bytes_burst = 10000 },
    { model = "big", compute_ms_per_day = 1000000, bytes_per_s = 1000, bytes_burst = 10000 },
    { model = "*", compute_ms_per_day = 1000000 },
]"""


class Mixed:
    """A stream of two models with a limit for each of them and one for both."""

    def __init__(self) -> None:
        self.desk = desk = Desk(BOTH)
        first = desk.take("small")
        self.stream = StreamGrant(first, "small", desk.now)
        further = desk.limiter.acquire_further(desk.tenant, desk.target("big"), 0, desk.now, self.stream.held)
        assert isinstance(further, Grant)
        self.stream.add_message(further, "big", desk.now)
        self.meters = {meter.bound.name: meter for grant in (first, further) for meter in grant.meters}
        self._before = self._used()

    def _used(self) -> dict[str, float]:
        return {name: meter.bound.limit - meter.remaining(self.desk.now)[0] for name, meter in self.meters.items()}

    def used(self) -> tuple[float, float, float]:
        """Return the microseconds that are used beyond what is reserved: by the small model, the big one, and both
        together.
        """
        used = self._used()
        names = ("model:small/compute-day", "model:big/compute-day", "model:*/compute-day")
        small, big, both = (used[name] - self._before[name] for name in names)
        return small, big, both

    def bytes(self) -> tuple[float, float]:
        used = self._used()
        return used["model:small/bytes"], used["model:big/bytes"]


def test_an_answers_bytes_count_for_the_model_it_names() -> None:
    mixed = Mixed()
    now = mixed.desk.now
    mixed.stream.count_answer(3000, "small", now)
    assert mixed.bytes() == (3000, 0)
    mixed.stream.count_answer(500, "big", now)
    assert mixed.bytes() == (3000, 500)
    for unknown in ("", "other"):
        mixed.stream.count_answer(100, unknown, now)
    assert mixed.bytes() == (3200, 700), "it may be of either"


def test_limits_of_a_streams_models_are_remembered_up_to_a_bound() -> None:
    mixed = Mixed()
    now = mixed.desk.now
    for n in range(MAX_MODELS + 2):
        further = mixed.desk.limiter.acquire_further(
            mixed.desk.tenant, mixed.desk.target(f"m{n}"), 0, now, mixed.stream.held
        )
        assert isinstance(further, Grant)
        mixed.stream.add_message(further, f"m{n}", now)
    for n in range(MAX_MODELS + 2):
        mixed.stream.count_answer(100, f"m{n}", now)
    assert len(mixed.stream._models) == MAX_MODELS
    assert mixed.bytes() == (400, 400), "the bytes of the models that are not remembered count for all"


def test_a_model_that_says_more_was_at_work_all_the_time() -> None:
    """A stream's cheap messages between two answers of an expensive model do not lower the charge for it."""
    mixed = Mixed()
    stream, desk = mixed.stream, mixed.desk
    stream.message_sent("big", [], desk.now)
    desk.now += 1.0
    stream.worked(["big"], 1.0, desk.now)  # its first answer
    for _ in range(9):
        desk.now += 0.1
        stream.message_sent("small", [], desk.now)
        desk.now += 0.1
        stream.worked(["small"], 1.0, desk.now)
    stream.worked(["big"], 1.0, desk.now)  # its second
    small, big, _ = mixed.used()
    assert abs(small - 900_000) < 20 and abs(big - 2_800_000) < 20
    stream.settle(2_800_000, desk.now)
    for used in mixed.used()[1:]:
        assert abs(used + 10_000 - 2_800_000) < 20, "at the end both are charged with the whole"


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["ask", "answer", "pause"]), st.sampled_from(["small", "big"]), st.integers(1, 50)),
        max_size=60,
    ),
    st.integers(0, 3_000_000),
)
def test_each_model_pays_for_the_time_that_it_was_at_work(operations: list[tuple[str, str, int]], cost_us: int) -> None:
    mixed = Mixed()
    stream, desk, unanswered = mixed.stream, mixed.desk, Unanswered()
    at_work = {"small": 0, "big": 0}
    truth = {"small": 0.0, "big": 0.0, "both": 0.0}
    for what, model, ms in operations:
        for name, count in at_work.items():
            truth[name] += ms * 1e3 if count else 0.0
        truth["both"] += ms * 1e3 if any(at_work.values()) else 0.0
        desk.now += ms * 1e-3
        if what == "ask":
            stream.worked(unanswered.models, 1.0, desk.now)
            stream.message_sent(model, unanswered.models, desk.now)
            unanswered.sent(model)
            at_work[model] += 1
        elif what == "answer" and at_work[model]:
            stream.worked(unanswered.models, 1.0, desk.now)
            unanswered.note_answer(model, None)
            at_work[model] -= 1
    stream.worked(unanswered.models, 1.0, desk.now)
    for used, true in zip(mixed.used(), truth.values(), strict=True):
        assert abs(used - true) <= len(operations) + 1
    stream.settle(cost_us, desk.now)
    if truth["both"]:
        reserved = 10_000
        for used, true in zip(mixed.used(), truth.values(), strict=True):
            assert abs(used + reserved - cost_us * true / truth["both"]) <= cost_us * 0.01 + reserved * 2


class Wide(Backend):
    """The answers of its model `digits` have 50 kB."""

    async def stream(self, messages: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        async for message in messages:
            name = service_pb2.ModelInferRequest.FromString(message).model_name
            raw = [bytes(50_000)] if name == "digits" else []
            response = service_pb2.ModelInferResponse(model_name=name, raw_output_contents=raw)
            yield service_pb2.ModelStreamInferResponse(infer_response=response).SerializeToString()


@pytest.mark.parametrize("shared", [False, True])
async def test_what_one_model_answers_is_not_charged_to_another(shared: bool) -> None:
    """If all answers counted for every model of the stream, 100 kB of one would hold the other back for 99 s."""
    files = limited('limits = [{ model = "big", bytes_per_s = 1000, bytes_burst = 1000 }]')
    async with stack(Wide(), files=lambda p: widen(files(p)), shared=shared) as (address, _):
        async with asyncio.timeout(30):
            names = ["big", "digits", "digits", "big"]
            assert await send(address, [infer(name) for name in names]) == names
            assert await send(address, [infer("big")]) == ["big"]
