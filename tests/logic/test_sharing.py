"""Two inference pods behind one logic server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from scripted_discovery import ScriptedDiscovery

from oriel_logic.client.endpoints import Endpoints
from oriel_logic.client.inference import InferenceServers
from oriel_logic.client.model_streams import StreamServers, stream_client
from oriel_logic.client.upstreams import AddressWatch, http_client
from oriel_logic.errors import ModelBusy, ModelFailed, ModelUnavailable
from oriel_logic.observe.stages import Ledger
from oriel_wire.engine.client import HttpClient
from oriel_wire.errors import UpstreamUnread

ROW = np.array([[1, 2]], np.float32)


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., tuple[InferenceServers, Endpoints[HttpClient]]]]:
    made: list[InferenceServers] = []

    def connected(*ports: int) -> tuple[InferenceServers, Endpoints[HttpClient]]:
        endpoints: Endpoints[HttpClient] = Endpoints(http_client)
        endpoints.replace(("127.0.0.1", port) for port in ports)
        made.append(InferenceServers(endpoints, StreamServers(Endpoints(stream_client))))
        return made[-1], endpoints

    yield connected
    for one in made:
        await one.close()


async def ask(servers: InferenceServers, call: Any) -> None:
    context = call()
    outputs = await servers.bind(context, Ledger(context.trace)).infer("double", {"x": ROW})
    assert outputs["y"].tolist() == [[2, 4]]


async def test_two_pods_share_the_load_evenly(connect: Any, inference: Any, second_inference: Any, call: Any) -> None:
    servers, _ = connect(inference.port, second_inference.port)
    for _ in range(25):
        await asyncio.gather(*(ask(servers, call) for _ in range(8)))
    counts = [len(inference.calls), len(second_inference.calls)]
    assert sum(counts) == 200 and abs(counts[0] - counts[1]) <= 10, counts


async def test_a_slow_pod_gets_only_what_it_can_take(
    connect: Any, inference: Any, second_inference: Any, call: Any
) -> None:
    servers, _ = connect(inference.port, second_inference.port)
    await ask(servers, call)  # metadata
    inference.hold = True
    stuck = [asyncio.ensure_future(ask(servers, call)) for _ in range(8)]
    while len(second_inference.calls) < 4 or not inference.calls:
        await asyncio.sleep(0)
    for _ in range(20):
        await ask(servers, call)
    assert len(inference.calls) <= 9  # four or five of the eight, and none of the twenty once they were more
    for exchange in inference.calls:
        with contextlib.suppress(RuntimeError):
            inference.answer(exchange, "double")
    await asyncio.gather(*stuck)


async def test_a_pod_that_dies_between_requests_costs_none(
    connect: Any, inference: Any, second_inference: Any, call: Any
) -> None:
    """Its kept connections are reset, its port refuses: nothing was sent, so the other one is asked."""
    from .conftest import FakeInference, fake_server

    dying = FakeInference()
    async with fake_server(dying):
        servers, _ = connect(inference.port, dying.port)
        for _ in range(10):
            await ask(servers, call)
        assert dying.calls
    before = len(inference.calls)
    for _ in range(10):
        await asyncio.gather(*(ask(servers, call) for _ in range(4)))
    assert len(inference.calls) == before + 40


async def test_a_request_that_reached_nobody_is_asked_elsewhere(connect: Any, inference: Any, call: Any) -> None:
    servers, endpoints = connect(inference.port, 9)

    class Reset:
        async def request(self, *args: object, **keywords: object) -> None:
            raise UpstreamUnread("closed before it was read")

        async def close(self) -> None: ...

    endpoints._endpoints[1].client = Reset()
    for _ in range(4):
        await ask(servers, call)
    assert len(inference.calls) == 4


async def test_a_pod_that_dies_at_work_fails_its_requests_alone(
    connect: Any, inference: Any, second_inference: Any, call: Any
) -> None:
    """What was sent may have been executed: it is not sent twice."""
    servers, _ = connect(inference.port, second_inference.port)
    await asyncio.gather(*(ask(servers, call) for _ in range(2)))
    second_inference.calls.clear()
    second_inference.hold = True
    asked = [asyncio.ensure_future(ask(servers, call)) for _ in range(6)]
    while len(second_inference.calls) < 3:
        await asyncio.sleep(0)
    for exchange in second_inference.calls:
        exchange._connection.transport.abort()
    results = await asyncio.gather(*asked, return_exceptions=True)
    failed = [each for each in results if each is not None]
    assert len(failed) == 3 and all(isinstance(each, ModelFailed) for each in failed)


async def test_pods_come_and_go_by_lookup(inference: Any, second_inference: Any, call: Any) -> None:
    endpoints: Endpoints[HttpClient] = Endpoints(http_client)
    servers = InferenceServers(endpoints, StreamServers(Endpoints(stream_client)))
    name = ScriptedDiscovery([("127.0.0.1", inference.port)])
    watch = AddressWatch([name], endpoints.replace)
    await watch.start()
    await ask(servers, call)
    name.addresses = (("127.0.0.1", second_inference.port),)
    looked = name.lookups
    while name.lookups < looked + 2:
        await asyncio.sleep(0)
    await ask(servers, call)
    assert (len(inference.calls), len(second_inference.calls)) == (1, 1)
    await watch.close()
    await servers.close()


@pytest.mark.parametrize(
    "refusal",
    [
        (404, [], b'{"error": "unknown model"}'),
        (503, [], b'{"error": "not yet", "reason": "model_not_ready"}'),
        (503, [], b'{"error": "stopping", "reason": "server_stopping"}'),
    ],
)
async def test_a_pod_without_the_model_is_asked_once_and_costs_no_request(
    connect: Any, inference: Any, second_inference: Any, call: Any, refusal: Any
) -> None:
    """It answers faster than the one that works: with the fewest calls under way it would get them all."""
    servers, endpoints = connect(inference.port, second_inference.port)
    await ask(servers, call)
    inference.calls.clear()
    second_inference.calls.clear()
    second_inference.refuse = refusal
    for _ in range(10):
        await asyncio.gather(*(ask(servers, call) for _ in range(2)))
    assert len(inference.calls) == 20 and 1 <= len(second_inference.calls) <= 2
    second_inference.refuse = None
    for each in endpoints._endpoints:
        each.lacks = dict.fromkeys(each.lacks, 0.0)  # a second later
    await asyncio.gather(*(ask(servers, call) for _ in range(10)))
    assert len(second_inference.calls) >= 4


async def test_a_full_queue_is_not_passed_on(connect: Any, inference: Any, second_inference: Any, call: Any) -> None:
    servers, _ = connect(inference.port, second_inference.port)
    await ask(servers, call)
    asked = len(inference.calls) + len(second_inference.calls)
    inference.refuse = second_inference.refuse = (503, [], b'{"error": "full", "reason": "queue_full"}')
    with pytest.raises(ModelBusy):
        await ask(servers, call)
    assert len(inference.calls) + len(second_inference.calls) == asked + 1


async def test_a_model_that_no_pod_has_is_unavailable(
    connect: Any, inference: Any, second_inference: Any, call: Any
) -> None:
    servers, _ = connect(inference.port, second_inference.port)
    context = call()
    for _ in range(2):
        with pytest.raises(ModelUnavailable, match="model 'nope' is not served"):
            await servers.bind(context, Ledger(context.trace)).infer("nope", {"x": ROW})
