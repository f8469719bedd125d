"""The v2 client against a real socket and the real codec."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from time import monotonic
from typing import Any

import numpy as np
import pytest

from oriel_logic.client.endpoints import Endpoints
from oriel_logic.client.inference import BoundModels, InferenceServers
from oriel_logic.client.model_streams import StreamServers, stream_client
from oriel_logic.client.upstreams import http_client
from oriel_logic.errors import (
    DeadlineExceeded,
    LogicError,
    ModelBusy,
    ModelFailed,
    ModelInputWrong,
    ModelUnavailable,
    ModelUnreachable,
)
from oriel_logic.observe.stages import Ledger
from oriel_logic.server.visit import stage_span
from oriel_wire.context import CallContext
from oriel_wire.engine.client import HttpClient
from oriel_wire.observe.trace import format_traceparent, parse_traceparent
from oriel_wire.v2.http import decode_request

from ..waiting import until
from .conftest import FakeInference, fake_server

ROW = np.array([[1, 2]], np.float32)


class Caller:
    """One request's models and ledger."""

    def __init__(self, servers: InferenceServers, call: CallContext) -> None:
        self.ledger = Ledger(call.trace)
        self.models: BoundModels = servers.bind(call, self.ledger)


@pytest.fixture
async def servers() -> AsyncIterator[Callable[..., InferenceServers]]:
    made: list[InferenceServers] = []

    def connect(*ports: int, clock: Callable[[], float] = monotonic, **options: int) -> InferenceServers:
        endpoints: Endpoints[HttpClient] = Endpoints(partial(http_client, **options), clock=clock)
        endpoints.replace(("127.0.0.1", port) for port in ports)
        made.append(InferenceServers(endpoints, StreamServers(Endpoints(stream_client)), clock=clock))
        return made[-1]

    yield connect
    for one in made:
        await one.close()


async def test_numpy_in_and_out(servers: Any, inference: Any, call: Any) -> None:
    caller = Caller(servers(inference.port), call())
    outputs = await caller.models.infer("double", {"x": ROW})
    assert outputs["y"].tolist() == [[2, 4]]
    assert (outputs.model, outputs.model_version) == ("double", "1")
    with pytest.raises(KeyError, match="model 'double' gave no output 'z': it gave y"):
        outputs["z"]
    assert caller.ledger.cost_us == 250
    assert caller.ledger.upstream == "queue;dur=0.1, compute;dur=0.2"
    assert [name for name, _ in caller.ledger.timings()] == ["infer"]


async def test_a_scan_sends_the_time_axis_and_the_first_state(servers: Any, inference: Any, call: Any) -> None:
    caller = Caller(servers(inference.port), call())
    state = {"hidden": np.ones((1, 3), np.float32)}
    outputs = await caller.models.scan("double", {"x": ROW.repeat(5, axis=0)}, state=state, outputs=["y"])
    assert outputs["y"].tolist() == [[2, 4]] * 5
    exchange = inference.calls[0]
    request = decode_request("double", "", exchange.body, int(exchange.head.get("inference-header-content-length")))
    assert [(each.name, each.shape) for each in request.inputs] == [("x", (5, 2)), ("hidden", (1, 3))]
    assert request.parameters["scan"] is True
    assert caller.ledger.cost_us == 250 and [name for name, _ in caller.ledger.timings()] == ["scan"]
    with pytest.raises(ModelInputWrong, match="input 'x' of model 'double' takes shape"):
        await caller.models.scan("double", {"x": ROW[0]})
    with pytest.raises(ModelInputWrong, match="state of model 'double'"):
        await caller.models.scan("double", {"x": ROW}, state={"hidden": np.array([1j], np.complex64)})
    inference.refuse = (400, [("content-type", "application/json")], b'{"error": "model cannot be scanned"}')
    with pytest.raises(ModelInputWrong, match="cannot be scanned"):
        await caller.models.scan("double", {"x": ROW})


async def test_the_inference_server_sees_that_the_caller_of_a_scan_left(
    servers: Any, inference: Any, call: Any
) -> None:
    inference.hold = True
    scan = asyncio.create_task(Caller(servers(inference.port), call()).models.scan("double", {"x": ROW}))
    await inference.saw_a_call()
    scan.cancel()
    await inference.saw_the_caller_leave()


async def test_what_the_request_carries_goes_along(servers: Any, inference: Any, call: Any) -> None:
    context = call(deadline=monotonic() + 5, band=1, sampled=True)
    caller = Caller(servers(inference.port), context)
    await caller.models.infer("double", {"x": ROW}, outputs=["y"], version="1")
    head = inference.calls[0].head
    assert head.path == "/v2/models/double/versions/1/infer"
    assert 4000 < int(head.get("x-oriel-timeout-ms")) <= 5000
    assert [head.get(f"x-oriel-{name}") for name in ("tier", "priority", "tenant")] == ["gold", "1", "acme"]
    assert head.get("x-request-id") == "req-1"
    parent = parse_traceparent(head.get("traceparent"))
    assert parent is not None and parent.sampled and parent.trace_id == context.trace.trace_id
    (span,) = [stage_span(each, caller.ledger.root, 0.0) for each in caller.ledger.stages]
    assert format_traceparent(span.context) == head.get("traceparent")


async def test_metadata_is_fetched_once_for_all(servers: Any, inference: Any, call: Any) -> None:
    shared = servers(inference.port)
    await asyncio.gather(*(Caller(shared, call()).models.infer("double", {"x": ROW}) for _ in range(8)))
    assert (inference.metadata_calls, len(inference.calls)) == (1, 8)


async def test_a_configuration_is_fetched_once_for_all_and_again_later(servers: Any, inference: Any, call: Any) -> None:
    now = 1000.0
    shared = servers(inference.port, clock=lambda: now)
    inference.models["double"]["parameters"] = {"oriel.context": {"string_value": "8"}}
    context = call(deadline=monotonic() + now)
    callers = [Caller(shared, context).models for _ in range(8)]
    found = await asyncio.gather(*(each.parameters("double") for each in callers))
    assert found == [{"oriel.context": "8"}] * 8 and inference.metadata_calls == 1
    now += 3
    await callers[0].parameters("double")
    assert inference.metadata_calls == 2


async def test_a_replaced_model_is_noticed(servers: Any, inference: Any, call: Any) -> None:
    now = 1000.0
    shared = servers(inference.port, clock=lambda: now)
    context = call(deadline=monotonic() + now)
    await Caller(shared, context).models.infer("double", {"x": ROW})
    inference.models["double"]["inputs"] = [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
    wider = np.zeros((1, 3), np.float32)
    with pytest.raises(ModelInputWrong):  # asked a moment ago: not again
        await Caller(shared, context).models.infer("double", {"x": wider})
    now += 2
    await Caller(shared, context).models.infer("double", {"x": wider})
    assert inference.metadata_calls == 2


async def test_wrong_inputs_never_leave(servers: Any, inference: Any, call: Any) -> None:
    with pytest.raises(ModelInputWrong, match="input 'x' of model 'double' takes FP32"):
        await Caller(servers(inference.port), call()).models.infer("double", {"x": ROW.astype(int)})
    assert inference.calls == []


@pytest.mark.parametrize(
    ("refusal", "error", "retry_after_s"),
    [
        ((400, [], b'{"error": "bad shape"}'), ModelInputWrong, None),
        ((404, [], b'{"error": "gone"}'), ModelUnavailable, 1.0),
        ((429, [("retry-after", "7")], b'{"error": {"message": "slow down"}}'), ModelBusy, 7.0),
        ((503, [], b"not json"), ModelBusy, 1.0),
        ((504, [], b"{}"), DeadlineExceeded, None),
        ((500, [], b'{"error": 3}'), ModelFailed, None),
        ((200, [], b"nonsense"), ModelFailed, None),
        ((200, [("inference-header-content-length", "x")], b"{}"), ModelFailed, None),
    ],
)
async def test_refusals_keep_their_meaning(
    servers: Any, inference: Any, call: Any, refusal: Any, error: type[LogicError], retry_after_s: float | None
) -> None:
    inference.refuse = refusal
    with pytest.raises(error) as caught:
        await Caller(servers(inference.port), call()).models.infer("double", {"x": ROW})
    assert type(caught.value) is error
    assert caught.value.retry_after_s == retry_after_s


async def test_a_call_waits_for_a_server_that_restarts(servers: Any, call: Any) -> None:
    fake = FakeInference()
    async with fake_server(fake):
        connected = servers(fake.port)
        await Caller(connected, call()).models.infer("double", {"x": ROW})
    (endpoint,) = connected._endpoints._endpoints
    waiting = asyncio.ensure_future(Caller(connected, call()).models.infer("double", {"x": ROW}))
    await until(lambda: endpoint.failures)
    assert not waiting.done()
    with pytest.raises(ModelUnreachable) as caught:
        await Caller(connected, call()).models.ready("double")
    assert caught.value.retry_after_s == 1.0
    async with fake_server(fake):
        assert (await waiting)["y"].tolist() == [[2, 4]]


NOT_READY = b'{"error": "it is loaded", "reason": "model_not_ready"}'


async def test_a_call_waits_for_a_model_that_is_loaded_at_a_restart(servers: Any, inference: Any, call: Any) -> None:
    connected = servers(inference.port)
    inference.refuse = 503, [("retry-after", "0")], NOT_READY
    waiting = asyncio.ensure_future(Caller(connected, call()).models.infer("double", {"x": ROW}))
    await until(lambda: len(inference.calls) > 1)
    inference.refuse = None
    assert (await waiting)["y"].tolist() == [[2, 4]]


@pytest.mark.parametrize(
    ("name", "value", "left_s"),
    [("retry-after", "0", 0.0), ("retry-after", "3600", 60.0), ("x-oriel-retry", "spent", 60.0)],
)
async def test_a_model_that_is_not_loaded_in_time_is_unavailable_and_not_busy(
    servers: Any, inference: Any, call: Any, name: str, value: str, left_s: float
) -> None:
    late_s = 0.0
    connected = servers(inference.port, clock=lambda: monotonic() + late_s)
    await Caller(connected, call()).models.infer("double", {"x": ROW})
    inference.refuse = 503, [(name, value)], NOT_READY
    late_s = 60.0
    with pytest.raises(ModelUnavailable, match="model 'double' is not served now: it is loaded"):
        await Caller(connected, call(deadline=monotonic() + late_s + left_s)).models.infer("double", {"x": ROW})
    assert len(inference.calls) == 2


async def test_the_deadline_ends_the_wait(servers: Any, inference: Any, call: Any) -> None:
    inference.hold = True
    with pytest.raises(DeadlineExceeded) as caught:
        await Caller(servers(inference.port), call(deadline=monotonic() + 0.1)).models.infer("double", {"x": ROW})
    assert caught.value.stage == "infer"
    await inference.saw_the_caller_leave()


async def test_ready_and_metadata(servers: Any, inference: Any, call: Any) -> None:
    models = Caller(servers(inference.port), call()).models
    assert await models.ready("double") and not await models.ready("nope")
    spec = await models.metadata("double", version="1")
    assert (spec.name, spec.inputs["x"].datatype, spec.inputs["x"].shape) == ("double", "FP32", (-1, 2))
    assert list(spec.outputs) == ["y"]
    with pytest.raises(ModelUnavailable):
        await models.metadata("nope")


async def test_a_deadline_that_has_passed_sends_nothing(servers: Any, inference: Any, call: Any) -> None:
    connected = servers(inference.port)
    await Caller(connected, call()).models.infer("double", {"x": ROW})
    with pytest.raises(DeadlineExceeded):
        await Caller(connected, call(deadline=monotonic() - 1)).models.infer("double", {"x": ROW})
    assert len(inference.calls) == 1


async def test_calls_past_the_bound_wait_their_turn(servers: Any, inference: Any, call: Any) -> None:
    connected = servers(inference.port, max_connections=1)
    await Caller(connected, call()).models.infer("double", {"x": ROW})
    inference.hold = True
    first, second = (
        asyncio.ensure_future(Caller(connected, call()).models.infer("double", {"x": ROW})) for _ in range(2)
    )
    while len(inference.calls) < 2:
        await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded):
        await Caller(connected, call(deadline=monotonic() + 0.05)).models.infer("double", {"x": ROW})
    assert len(inference.calls) == 2
    for answered in (1, 2):
        inference.answer(inference.calls[answered], "double")
        while len(inference.calls) == answered + 1 and not second.done():
            await asyncio.sleep(0)
    assert (await first)["y"].tolist() == (await second)["y"].tolist() == [[2, 4]]
