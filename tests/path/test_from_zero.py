"""Services call models whose pools have no server: the calls wait in the gateway, wake the pools, and are answered."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
from fake_backend import FakeBackend

from oriel_gateway.admin.external_scaler import ExternalScaler
from oriel_gateway.core import Gateway
from oriel_gateway.identity.tickets import Tickets
from oriel_gateway.ingress.http import serve_public
from oriel_gateway.limits import EmbeddedLimiter
from oriel_inference.app import open_unit
from oriel_inference.model import TensorInfo
from oriel_inference.settings import Settings as InferenceSettings
from oriel_logic.client.upstreams import MAX_CONNECTIONS
from oriel_policies.documents import Tenant, compile_documents
from oriel_wire.observe.trace import ListSink
from oriel_wire.process.process import listen

from ..gateway.keda import Keda, keda
from ..inference import models
from ..waiting import until
from .units import bound, digest, logic

SERVICE = """
import numpy as np
from oriel_logic import service

@service
async def NAME(request, models, ctx):
    outputs = await models.infer("MODEL", {"x": np.array([request.json()], np.float32)})
    return {"model": outputs.model, "tier": ctx.tier}
"""
STREAM = """
import numpy as np
from oriel_logic import service

@service
async def streamed(request, models, ctx):
    x = {"x": np.array([request.json()], np.float32)}
    return [outputs.model async for outputs in models.stream("double", x)]
"""
HEADERS = """
from oriel_logic import service

@service
async def headers(request, models, ctx):
    return [name for name in request.headers if "ticket" in name]
"""
SERVICES = {
    "doubles": SERVICE.replace("NAME", "doubles").replace("MODEL", "double"),
    "triples": SERVICE.replace("NAME", "triples").replace("MODEL", "triple"),
    "streamed": STREAM,
    "headers": HEADERS,
}
DOCUMENTS = """
[tiers.gold]
band = 0
target_ms = 60000
[tiers.bronze]
band = 2
target_ms = 60000
[tiers.brief]
band = 1
target_ms = 1000
give_up_ms = 20000
[pools.logic]
probe = ""
max_inflight = 1000
learn_concurrency = false
endpoints = ["127.0.0.1:{logic}"]
{pools}
[[routes]]
service = "*"
pool = "logic"
[[routes]]
model = "triple"
pool = "triples"
[[routes]]
model = "*"
pool = "doubles"
[tenants.acme]
tier = "gold"
services = ["*"]
keys = [{{ sha256 = "{gold}" }}, {{ sha256 = "{bronze}", tier = "bronze" }},
  {{ sha256 = "{brief}", tier = "brief" }}]
limit = {{ requests_per_s = 1, burst = {burst} }}
"""
POOL = """
[pools.{name}]
probe = ""
max_inflight = {permits}
max_queue = {places}
learn_concurrency = false
discover = "dns:127.0.0.1:9"
grpc_discover = "dns:127.0.0.1:9"
[pools.{name}.scaling]
minimum = 0
maximum = 9
start_ms = 20000
{hold}
"""
BODY = b"[1, 2, 3, 4]"
LONG_MS = 200_000  # a deadline after any start on a busy machine


class OfAnother(Tickets):
    """Signs with a key that it does not accept."""

    def line(self, tenant: Tenant, request_id: str, left_s: float) -> str:
        return Tickets([b"x" * 32]).line(tenant, request_id, left_s)


@dataclass
class Path0:
    """A gateway and a logic server; the pools `doubles` and `triples` have no server until `start`."""

    core: Gateway
    client: httpx.AsyncClient
    logic: httpx.AsyncClient
    operator: Keda
    folder: Path
    stack: AsyncExitStack
    fake: FakeBackend

    def call(self, service: str, key: str = "gold", timeout_ms: int | None = LONG_MS) -> "asyncio.Task[httpx.Response]":
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        if timeout_ms is not None:
            headers["x-request-timeout-ms"] = str(timeout_ms)
        return asyncio.create_task(self.client.post(f"/v1/services/{service}", content=BODY, headers=headers))

    def held(self, pool: str) -> int:
        gate = self.core.pools[pool]
        return gate.endpoints.parked + gate.grpc.parked + len(gate.admission.queue)

    def wanted(self, pool: str) -> float:
        plan = self.core.scaled.plans[pool]
        plan.update(monotonic())
        return plan.latest.wanted

    async def start(self, pool: str) -> None:
        """Start an inference server with both models, as a replica of this pool."""
        folder = self.folder / f"models-{pool}"
        models.put(folder, "double", models.double(), models.DOUBLE)
        models.put(folder, "triple", models.double(), models.DOUBLE.replace("double", "triple", 1))
        settings = InferenceSettings(
            repositories=(folder,), http_port=0, grpc_port=0, metrics_port=0, cores=1, drain_s=5.0
        )
        unit = await self.stack.enter_async_context(open_unit(settings, backends=lambda _: self.fake, sink=ListSink()))
        self.core.pools[pool].endpoints.assign([("127.0.0.1", unit.http_port)])
        self.core.pools[pool].grpc.assign([("127.0.0.1", unit.grpc_port)])


@asynccontextmanager
async def at_zero(
    tmp_path: Path, *, permits: int = 8, places: int = 400, burst: int = 30, hold_ms: int = 0
) -> AsyncIterator[Path0]:
    async with AsyncExitStack() as opened:
        public, internal = bound(), bound()
        port = public.getsockname()[1]
        at = (("127.0.0.1", internal.getsockname()[1]),)
        unit, logic_port = await opened.enter_async_context(logic(tmp_path / "services", SERVICES, gateway=at))
        hold = f"hold_ms = {hold_ms}" if hold_ms else ""
        names = ("doubles", "triples")
        pools = "".join(POOL.format(name=name, permits=permits, places=places, hold=hold) for name in names)
        text = DOCUMENTS.format(
            logic=logic_port,
            pools=pools,
            burst=burst,
            gold=digest("gold"),
            bronze=digest("bronze"),
            brief=digest("brief"),
        )
        core = Gateway(compile_documents({"all.toml": text.encode()}), limiter=EmbeddedLimiter(), sink=ListSink())
        opened.push_async_callback(core.close)
        server = await serve_public(core, public)
        opened.push_async_callback(server.drain, 0.0)
        server = await serve_public(core, internal)
        opened.push_async_callback(server.drain, 0.0)
        core.callers.tickets, core.callers.internal = Tickets([b"k" * 32]), server.memo
        for name in names:
            for endpoints in (core.pools[name].endpoints, core.pools[name].grpc):
                await until(lambda e=endpoints: e.looked_up)
                endpoints.look_up_s = inf  # from now on the test sets the addresses
                endpoints.assign([])
        scaler = ExternalScaler(core.scaled)
        operator = await opened.enter_async_context(keda(await scaler.open(listen("127.0.0.1", 0, "gateway scaler"))))
        opened.push_async_callback(scaler.close)
        tensors = [TensorInfo(name=name, datatype="FP32", shape=(-1, 4)) for name in ("x", "y")]
        fake = FakeBackend(tensors[:1], tensors[1:])
        client = await opened.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=None, limits=httpx.Limits())
        )
        direct = await opened.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{logic_port}", trust_env=False, timeout=60)
        )
        running = await opened.enter_async_context(AsyncExitStack())
        yield Path0(core, client, direct, operator, tmp_path, running, fake)


async def test_the_call_of_a_service_wakes_the_pool_of_its_model_and_is_answered(tmp_path: Path) -> None:
    async with at_zero(tmp_path) as path:
        woken = asyncio.Event()
        async with path.operator.listening("doubles", woken=woken.set):
            await until(lambda: path.operator.states.get("doubles") == [False])
            assert await path.operator.poll("doubles") == (1.0, 0.0, False)
            calls = [path.call("doubles") for _ in range(5)]
            await woken.wait()
            await until(lambda: path.held("doubles") == 5)
            assert path.wanted("doubles") == 1
            assert path.core.scaled.plans["doubles"].demand.total.held == 5
            assert await path.operator.poll("doubles") == (1.0, 1.0, True)
            assert not any(call.done() for call in calls)
            await path.start("doubles")
            for answer in await asyncio.gather(*calls):
                assert (answer.status_code, answer.json()) == (200, {"model": "double", "tier": "gold"})
            assert await path.operator.poll("triples") == (1.0, 0.0, False)


async def test_a_stream_from_a_model_waits_as_well(tmp_path: Path) -> None:
    async with at_zero(tmp_path) as path:
        call = path.call("streamed")
        await until(lambda: path.held("doubles") == 1)
        await path.start("doubles")
        answer = await call
        assert (answer.status_code, answer.json()) == (200, ["double"])


async def test_a_call_whose_deadline_passes_is_told_what_it_waited_for(tmp_path: Path) -> None:
    async with at_zero(tmp_path) as path:
        answer = await path.call("doubles", timeout_ms=3000)
        error: Any = answer.json()["error"]
        assert (answer.status_code, error["reason"]) == (502, "model_unreachable")
        assert error["message"] == "model 'double': no server of this pool could be reached before the deadline"
        assert int(answer.headers["retry-after"]) >= 1
        await until(lambda: path.held("doubles") == 0 and path.core.pools["logic"].unused)


async def test_a_request_waits_for_its_model_as_long_as_the_pool_of_the_model_holds_calls(tmp_path: Path) -> None:
    """Not only for the 20 s of its tier, but never beyond the deadline that its client asks for."""
    async with at_zero(tmp_path, hold_ms=300_000) as path:
        calls = [path.call("doubles", "brief", None), path.call("doubles", "brief", 100_000)]
        await until(lambda: path.held("doubles") == 2 or any(call.done() for call in calls))
        assert [call.result().text for call in calls if call.done()] == []
        gates, now = path.core.pools, monotonic()
        waiting = sorted(each.deadline - now for each in gates["doubles"].endpoints._parked)
        assert 20.0 < waiting[0] < 100.0 < waiting[1] < 300.0
        await path.start("doubles")
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
        assert path.core.scaled.hold_s("brief", gates["logic"]) == 300.0, "of the other model"


async def test_when_a_server_comes_gold_is_answered_before_bronze(tmp_path: Path) -> None:
    async with at_zero(tmp_path, permits=1) as path:
        order: list[str] = []
        await path.start("doubles")
        assert (await path.call("doubles")).status_code == 200  # logic has learned the model
        server = path.core.pools["doubles"].endpoints[0].address
        path.core.pools["doubles"].endpoints.assign([])
        calls = []
        for number, key in enumerate(("bronze", "bronze", "bronze", "gold", "gold"), 1):
            calls.append(path.call("doubles", key))
            calls[-1].add_done_callback(lambda _, key=key: order.append(key))
            await until(lambda number=number: path.held("doubles") == number)
        demand = path.core.scaled.plans["doubles"]
        assert path.wanted("doubles") >= 1 and demand.demand.total.held == 5
        path.core.pools["doubles"].endpoints.assign([server])  # the server is there again
        for answer in await asyncio.gather(*calls):
            assert answer.status_code == 200
        assert order == ["gold", "gold", "bronze", "bronze", "bronze"]


async def test_more_calls_wait_than_a_logic_server_has_connections_to_an_inference_server(tmp_path: Path) -> None:
    """Calls that waited in logic for a connection would be neither counted nor ordered by the gateway."""
    async with at_zero(tmp_path, burst=400) as path:
        calls = [path.call("doubles") for _ in range(MAX_CONNECTIONS + 44)]
        await until(lambda: path.held("doubles") == len(calls) or any(call.done() for call in calls))
        assert [call.result().text for call in calls if call.done()] == []
        assert path.wanted("doubles") == 1
        await path.start("doubles")
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}


async def test_what_waits_is_bounded_and_gold_takes_the_place_of_bronze(tmp_path: Path) -> None:
    async with at_zero(tmp_path, places=2) as path:
        first, second = path.call("doubles", "bronze"), path.call("doubles", "bronze")
        await until(lambda: path.held("doubles") == 2)
        refused = await path.call("doubles", "bronze")
        assert (refused.status_code, refused.json()["error"]["reason"]) == (503, "model_busy")
        assert "no server of this pool is ready and enough calls wait for one" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        gold = path.call("doubles")
        done, _ = await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
        assert [call.result().status_code for call in done] == [503]
        await path.start("doubles")
        assert (await gold).status_code == 200
        assert sorted(call.status_code for call in await asyncio.gather(first, second)) == [200, 503]


async def test_services_that_wait_for_different_models_wake_each_its_own(tmp_path: Path) -> None:
    async with at_zero(tmp_path) as path:
        async with path.operator.listening("doubles", "triples"):
            doubled, tripled = path.call("doubles"), path.call("triples")
            await until(lambda: path.held("doubles") == path.held("triples") == 1)
            await until(lambda: all(True in path.operator.states.get(each, []) for each in ("doubles", "triples")))
            await path.start("triples")
            assert (await tripled).json()["model"] == "triple"
            assert not doubled.done() and path.held("doubles") == 1
            await path.start("doubles")
            assert (await doubled).json()["model"] == "double"


async def test_the_limits_of_the_tenant_count_a_request_once(tmp_path: Path) -> None:
    """`acme` may make 30 requests: a call of a service that calls a model counts as one of them, not as two or
    three.
    """
    async with at_zero(tmp_path) as path:
        await path.start("doubles")
        for _ in range(20):
            assert (await path.call("doubles")).status_code == 200


async def test_a_ticket_that_the_internal_port_does_not_accept_fails_the_call(tmp_path: Path) -> None:
    async with at_zero(tmp_path) as path:
        path.core.callers.tickets = OfAnother([b"k" * 32])
        answer = await path.call("doubles")
        assert (answer.status_code, answer.json()["error"]["reason"]) == (502, "model_failed")
        assert "(401)" in answer.json()["error"]["message"]


async def test_services_do_not_see_tickets_and_call_no_model_without_one(tmp_path: Path) -> None:
    async with at_zero(tmp_path) as path:
        answer = await path.call("headers")
        assert answer.json() == []
        direct = await path.logic.post(
            "/v1/services/doubles", content=BODY, headers={"content-type": "application/json"}
        )
        assert (direct.status_code, direct.json()["error"]["reason"]) == (502, "model_failed")
        assert "send it through a gateway that has ticket keys" in direct.json()["error"]["message"]
