"""Models on the servers of one pool: real inference servers, and gateways that know nothing of one another."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from oriel_cli.main import main
from oriel_gateway.admin.app import admin_app
from oriel_gateway.core import Gateway
from oriel_gateway.pools.model_placement import PoolPlacement
from oriel_policies.upstreams.assignment import Rendezvous
from oriel_wire.process.control import serve_control
from oriel_wire.process.process import listen

from ..gateway.stack import Client, documents, gateway
from ..inference.demand_server import MODEL_BYTES, ROW, Demanded, demanded, put
from ..waiting import until

BODY = json.dumps(ROW).encode()


def files(ports: list[int], **more: Any) -> dict[str, bytes]:
    text = documents(ports, pool='probe = "/v2/health/ready"\nplace_models = true', **more)["all.toml"].decode()
    lines = [line for line in text.split("\n") if not line.startswith("grpc_endpoints")]
    return {"all.toml": "\n".join(lines).encode()}


class Cluster:
    """Servers of one pool, and gateways in front of them that decide fifty times a second."""

    def __init__(self, servers: list[Demanded], gateways: list[tuple[int, Gateway]]) -> None:
        self.servers, self.gateways = servers, gateways
        self.addresses = [f"127.0.0.1:{each.unit.http_port}" for each in servers]

    def placement(self, number: int = 0) -> PoolPlacement:
        return self.gateways[number][1].placements.pools["p"]

    def first(self, model: str) -> str:
        """Return the server whose turn it is to load a model which none has."""
        table = Rendezvous(self.addresses)
        return table.names[table.first(model) or 0]

    def have(self, model: str) -> list[bool]:
        return [each.unit.surface.catalog.is_ready(model) for each in self.servers]

    async def call(self, model: str, number: int = 0) -> int:
        async with Client(self.gateways[number][0]) as client:
            reply = await client.ask(f"/v2/models/{model}/infer", BODY)
            assert reply.status == 200, reply
            return int(reply.status)


@asynccontextmanager
async def cluster(
    root: Path, *, gateways: int = 1, budget: int = 64 * MODEL_BYTES, young_s: float = 0.0
) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(demanded(root, model_memory_bytes=budget, young_s=young_s))
            for _ in range(2)
        ]
        found = []
        for _ in range(gateways):
            port, core = await stack.enter_async_context(gateway(files([each.unit.http_port for each in servers])))
            core.placements.every_s = 0.02
            task = asyncio.ensure_future(core.placements.run())
            stack.callback(task.cancel)
            await until(lambda core=core: len(core.pools["p"].endpoints.usable) == 2)  # type: ignore[misc]
            found.append((port, core))
        made = Cluster(servers, found)
        await until(lambda: all("p" in core.placements.pools for _, core in found))
        await until(lambda: all(made.placement(n).placement for n in range(gateways)))
        yield made


async def test_calls_at_two_gateways_for_models_that_nobody_has_load_each_of_them_once(tmp_path: Path) -> None:
    names = [f"m{number}" for number in range(8)]
    for name in names:
        put(tmp_path, name)
    async with cluster(tmp_path, gateways=2) as it:
        statuses = await asyncio.gather(
            *(it.call(name, number) for name in names for number in (0, 1) for _ in range(3))
        )
        assert set(statuses) == {200}
        assert sorted(sum(it.have(name)) for name in names) == [1] * 8
        assert sum(len(each.fake.sessions) for each in it.servers) == sum(
            len(entry.serving.sessions)
            for each in it.servers
            for name in names
            for entry in each.unit.surface.catalog.entries(name)
            if entry.serving is not None
        )
        for name in names:
            assert it.have(name) == [address == it.first(name) for address in it.addresses]


async def test_a_model_with_work_for_two_servers_is_loaded_once_on_the_other_by_two_gateways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oriel_gateway.pools.model_placement.FALL_S", 1e9)  # what it is found to need stays
    put(tmp_path, "busy")
    async with cluster(tmp_path, gateways=2) as it:
        assert await it.call("busy") == 200
        assert sum(it.have("busy")) == 1
        there = it.addresses[it.have("busy").index(True)]
        await until(lambda: all("busy" in it.placement(n)._uses for n in (0, 1)))
        for number in (0, 1):
            it.placement(number)._uses["busy"].work[there] = 1.2
        await until(lambda: it.have("busy") == [True, True])
        await until(lambda: sum(it.placement(n).steps["load"] for n in (0, 1)) >= 1)
        (other,) = (each for each, address in zip(it.servers, it.addresses, strict=True) if address != there)
        ran = other.unit.surface.catalog.get("busy").batcher.statistics

        async def called() -> bool:
            return await it.call("busy") == 200 and ran.success.count > 0

        await until(called)  # calls go there as well now


async def test_a_model_without_memory_on_its_server_is_loaded_by_another_that_has_some(tmp_path: Path) -> None:
    """It was refused although another server had room: only its own one was tried, and every call tried that again."""
    names = [f"m{number}" for number in range(12)]
    for name in names:
        put(tmp_path, name)
    async with cluster(tmp_path, budget=3 * MODEL_BYTES // 2, young_s=60.0) as it:
        first, second = [name for name in names if it.first(name) == it.addresses[0]][:2]
        assert await it.call(first) == 200
        assert it.have(first) == [True, False]
        assert [await it.call(second) for _ in range(3)] == [200] * 3
        assert it.have(second) == [False, True] and it.have(first) == [True, False]
        refused = [each.unit.surface.control.memory.refusals[second] for each in it.servers]
        assert refused == [1, 0], "the next calls do not go there again"


async def test_a_server_that_does_not_answer_stops_all_loads(tmp_path: Path) -> None:
    put(tmp_path, "m")
    async with cluster(tmp_path) as it:
        placement = it.placement()
        placement.gate.endpoints.usable.append(placement.gate.endpoints._make(("127.0.0.1", 1)))
        placement._reports.clear()
        before = placement.placement
        noted_s = placement._noted_s
        turns = 0

        async def count(*_: Any) -> None:
            nonlocal turns
            turns += 1
            await type(placement).turn(placement, *_)

        placement.turn = count  # type: ignore[method-assign]
        await until(lambda: turns >= 3)
        assert placement.placement is before and placement._noted_s == noted_s


async def test_the_command_shows_which_server_has_a_model_and_where_it_belongs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, "m")
    async with cluster(tmp_path) as it:
        assert await it.call("m") == 200
        await until(lambda: bool((placed := it.placement().placement) and placed.loaded("m")))
        stop = asyncio.Event()
        socket = listen("127.0.0.1", 0, "admin")
        port = socket.getsockname()[1]
        serving = asyncio.ensure_future(serve_control(admin_app(it.gateways[0][1]), socket, stop))
        assert await asyncio.to_thread(main, ["models", "placement", "--url", f"http://127.0.0.1:{port}"]) == 0
        text = capsys.readouterr().out
        where = it.addresses[it.have("m").index(True)]
        assert "BELONGS ON" in text and text.split()[-2:] == [where, where]
        assert await asyncio.to_thread(main, ["models", "placement", "no", "--url", f"http://127.0.0.1:{port}"]) == 0
        assert "pool no does not place models" in capsys.readouterr().out
        stop.set()
        await serving
