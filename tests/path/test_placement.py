"""Models on the servers of one pool: real inference servers, and gateways that share a ledger."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from oriel_cli.main import main
from oriel_gateway.admin.app import admin_app
from oriel_gateway.core import Gateway
from oriel_gateway.pools.model_placement import PoolPlacement
from oriel_policies.upstreams.placement import first_of
from oriel_wire.process.control import serve_control
from oriel_wire.process.process import listen

from ..conformance.memory_ledger import MemoryLedger
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

    def __init__(self, servers: list[Demanded], gateways: list[tuple[int, Gateway]], ledger: MemoryLedger) -> None:
        self.servers, self.gateways, self.ledger = servers, gateways, ledger

    def placement(self, number: int = 0) -> PoolPlacement:
        return self.gateways[number][1].placements.pools["p"]

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
        ledger = MemoryLedger(lambda: monotonic() * 1e6)
        found = []
        for number in range(gateways):
            port, core = await stack.enter_async_context(gateway(files([each.unit.http_port for each in servers])))
            core.placements.every_s = core.placements.leave_s = 0.02
            task = asyncio.ensure_future(core.placements.run(ledger.seat(f"g{number}")))
            stack.callback(task.cancel)
            await until(lambda core=core: len(core.pools["p"].endpoints.usable) == 2)  # type: ignore[misc]
            found.append((port, core))
        made = Cluster(servers, found, ledger)
        await until(lambda: all("p" in core.placements.pools for _, core in found))
        await until(lambda: all(made.placement(n).placed.models for n in range(gateways)))
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
        addresses = [f"127.0.0.1:{each.unit.http_port}" for each in it.servers]
        for name in names:
            assert it.have(name) == [address == first_of(addresses, name) for address in addresses]


async def test_one_gateway_decides_and_the_others_follow_and_take_over(tmp_path: Path) -> None:
    put(tmp_path, "m")
    async with cluster(tmp_path, gateways=2) as it:
        assert sorted(it.placement(n).leads for n in (0, 1)) == [False, True]
        (leader,) = (n for n in (0, 1) if it.placement(n).leads)
        follower = 1 - leader
        assert it.placement(follower).placed.models == it.placement(leader).placed.models
        holder, _, state = it.ledger.roles["models:p"]
        it.ledger.roles["models:p"] = holder, 0.0, state  # its lease has ended; whoever asks first has the role
        await it.ledger.seat(f"g{follower}").lead("models:p", b"", for_s=60.0)
        await until(lambda: it.placement(follower).leads and not it.placement(leader).leads)
        assert await it.call("m") == 200


async def test_a_server_gets_no_more_calls_for_a_model_before_it_takes_it_out_of_memory(tmp_path: Path) -> None:
    """They would load it again."""
    put(tmp_path, "a")
    put(tmp_path, "b")
    async with cluster(tmp_path, budget=5 * MODEL_BYTES // 2) as it:
        assert [await it.call(name) for name in ("a", "b")] == [200, 200]
        placement = it.placement()
        (source,) = (n for n in (0, 1) if it.have("a")[n])
        target = 1 - source
        address = [f"127.0.0.1:{each.unit.http_port}" for each in it.servers]
        await until(lambda: any(line.name == "a" and line.in_use for line in placement.placed.models))
        statuses: list[int] = []
        stop = asyncio.Event()

        async def load() -> None:
            while not stop.is_set():
                statuses.append(await it.call("a"))

        calls = asyncio.ensure_future(load())
        loaded = await it.servers[target].client.post("/v2/repository/models/a/load", json={})
        assert loaded.status_code == 200
        line = next(each for each in placement.placed.models if each.name == "a")
        placement._leaving[("a", address[source])] = monotonic()  # published from now on
        placement.placed.leaving = [("a", address[source])]
        placement.adopt(placement.placed)
        ran = it.servers[source].unit.surface.catalog.get("a").batcher.statistics
        before = ran.success.count
        seen = len(statuses)
        await until(lambda: len(statuses) > seen + 5)
        assert ran.success.count <= before + 1  # at most the one that was on its way
        stop.set()
        await calls
        assert set(statuses) == {200} and line.why


async def test_a_model_with_work_for_two_servers_is_loaded_on_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "busy")
    async with cluster(tmp_path) as it:
        assert await it.call("busy") == 200
        assert sum(it.have("busy")) == 1
        placement = it.placement()
        await until(lambda: "busy" in placement._uses)
        monkeypatch.setattr("oriel_gateway.pools.model_placement.WORK_S", 1e9)  # what it is found to need stays
        placement._uses["busy"].work = 1.2
        await until(lambda: it.have("busy") == [True, True])
        await until(lambda: placement.steps["load"] == 1)
        await until(lambda: len(placement.placed.models[0].loaded) == 2)
        assert "servers" in placement.placed.models[0].why


async def test_a_model_without_memory_on_its_server_is_loaded_by_another_that_has_some(tmp_path: Path) -> None:
    """It was refused although another server had room: only its own one was tried, and every call tried that again."""
    names = [f"m{number}" for number in range(12)]
    for name in names:
        put(tmp_path, name)
    async with cluster(tmp_path, budget=3 * MODEL_BYTES // 2, young_s=60.0) as it:
        address = [f"127.0.0.1:{each.unit.http_port}" for each in it.servers]
        first, second = [name for name in names if first_of(address, name) == address[0]][:2]
        placement = it.placement()
        placement._homes = {}  # the gateway knows no sizes of models that were never loaded, and moves none
        placement.adopt = placement._begin = lambda *_: None  # type: ignore[method-assign]
        assert await it.call(first) == 200
        assert it.have(first) == [True, False]
        assert [await it.call(second) for _ in range(3)] == [200] * 3
        assert it.have(second) == [False, True] and it.have(first) == [True, False]
        refused = [each.unit.surface.control.memory.refusals[second] for each in it.servers]
        assert refused == [1, 0], "the next calls do not go there again"


async def test_a_server_that_does_not_answer_stops_all_moves(tmp_path: Path) -> None:
    put(tmp_path, "m")
    async with cluster(tmp_path) as it:
        placement = it.placement()
        placement.gate.endpoints.usable.append(placement.gate.endpoints._make(("127.0.0.1", 1)))
        placement._reports.clear()
        before = placement.placed
        noted_s = placement._noted_s
        turns = 0

        async def count(*_: Any) -> None:
            nonlocal turns
            turns += 1
            await type(placement).turn(placement, *_)

        placement.turn = count  # type: ignore[method-assign]
        await until(lambda: turns >= 3)
        assert placement.placed is before and placement._noted_s == noted_s


async def test_the_command_shows_which_server_has_a_model_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, "m")
    async with cluster(tmp_path) as it:
        assert await it.call("m") == 200
        await until(lambda: bool(it.placement().placed.models[0].loaded))
        stop = asyncio.Event()
        socket = listen("127.0.0.1", 0, "admin")
        port = socket.getsockname()[1]
        serving = asyncio.ensure_future(serve_control(admin_app(it.gateways[0][1]), socket, stop))
        assert await asyncio.to_thread(main, ["models", "placement", "--url", f"http://127.0.0.1:{port}"]) == 0
        text = capsys.readouterr().out
        where = it.placement().placed.models[0].loaded[0]
        assert "p: this gateway decides" in text and where in text and "stays where it is loaded" in text
        assert await asyncio.to_thread(main, ["models", "placement", "no", "--url", f"http://127.0.0.1:{port}"]) == 0
        assert "pool no does not place models" in capsys.readouterr().out
        stop.set()
        await serving
