"""Pools whose endpoints are the pods of a Kubernetes service: a scripted API server, and processes as pods."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from oriel_gateway.pools.endpoint_state import HttpEndpoint, Reach
from oriel_gateway.pools.endpoints import EndpointSet
from oriel_gateway.pools.health import Watch
from oriel_policies.upstreams.ejection import Cause
from oriel_wire.discovery.endpoint_slices import EndpointSlices, Listed

from ..waiting import until
from ..wire.kubernetes_api import KubernetesApi, endpoint, kubernetes, piece
from .endpoint_pools import endpoints
from .gate import INFER, idle
from .pods import PROBED, pod
from .stack import BRONZE, GOLD, Client, Seen, documents, gateway, upstream

WAKING = "x-request-timeout-ms: 200000\r\n"  # a deadline after any start on a busy machine


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubernetesApi]:
    async with kubernetes(tmp_path) as (api, where):

        def watch_service(service: str, changed: Callable[[], None]) -> EndpointSlices:
            return EndpointSlices(service, changed=changed, api=lambda: where, wait_s=0.001)

        monkeypatch.setattr(Watch, "watch_service", staticmethod(watch_service))
        yield api


def of_service(port: int, *, probe: str = PROBED, **more: Any) -> dict[str, bytes]:
    """Documents of one pool: the pods of the service `inference`, on this port."""
    text = documents([1], pool=probe, **more)["all.toml"]
    lines = [line for line in text.split(b"\n") if not line.startswith((b"endpoints", b"grpc_endp"))]
    discover = f'[pools.p]\ndiscover = "kubernetes:inference:{port}"'.encode()
    return {"all.toml": b"\n".join(lines).replace(b"[pools.p]", discover)}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.2", 0))
        return int(one.getsockname()[1])


async def test_a_pod_is_called_when_it_is_announced_and_left_when_it_terminates(cluster: KubernetesApi) -> None:
    async with pod(host="127.0.0.2") as first, gateway(of_service(first.port)) as (port, core), Client(port) as client:
        these = core.pools["p"].endpoints
        client.send(INFER, b"one", headers=WAKING)
        await until(lambda: these.parked == 1)
        cluster.put(piece("a", endpoint("127.0.0.2", pod="1")))
        assert (await client.reply()).status == 200 and first.ran[b"ran one"] == 1
        async with pod(host="127.0.0.3", port=first.port):
            cluster.put(piece("b", endpoint("127.0.0.3", pod="2")))
            await until(lambda: len(these.usable) == 2)
            cluster.put(piece("a", endpoint("127.0.0.2", pod="1", terminating=True)))
            await until(lambda: [member.host for member in these] == ["127.0.0.3"])
            assert [(await client.ask(INFER, b"two")).status for _ in range(4)] == [200] * 4
            assert first.ran[b"ran two"] == 0
            cluster.delete("b")
            await until(lambda: len(these) == 0)
        assert idle(core)


async def test_a_pod_that_kubernetes_does_not_call_ready_yet_is_asked_and_used(cluster: KubernetesApi) -> None:
    number = free_port()
    cluster.put(piece("a", endpoint("127.0.0.2", ready=False, pod="1")))
    async with gateway(of_service(number)) as (port, core), Client(port) as client, Client(port) as other:
        these = core.pools["p"].endpoints
        await until(lambda: [member.reach for member in these] == [Reach.UNREACHABLE])  # nothing listens there
        client.send(INFER, b"x", key=GOLD, headers=WAKING)
        other.send(INFER, b"y", key=BRONZE, headers=WAKING)
        await until(lambda: these.parked == 2 and core.endpoint_watch._hurry_timer is not None)
        async with pod(host="127.0.0.2", port=number):
            assert (await client.reply()).status == 200 and (await other.reply()).status == 200
            assert these[0].reach is Reach.READY and not these[0].trial
            await until(lambda: core.endpoint_watch._hurry_timer is None)


async def test_without_a_probe_only_kubernetes_knows_who_is_ready(cluster: KubernetesApi) -> None:
    async with pod(host="127.0.0.2") as one:
        cluster.put(piece("a", endpoint("127.0.0.2", ready=False, pod="1")))
        async with gateway(of_service(one.port, probe='probe = ""')) as (port, core), Client(port) as client:
            client.send(INFER, b"x", headers=WAKING)
            these = core.pools["p"].endpoints
            await until(lambda: these.parked == 1 and these.looked_up)
            assert len(these) == 0 and core.endpoint_watch._hurry_timer is None
            cluster.put(piece("a", endpoint("127.0.0.2", pod="1")))
            assert (await client.reply()).status == 200


async def test_nobody_is_hurried_while_no_call_waits(cluster: KubernetesApi) -> None:
    cluster.put(piece("a", endpoint("127.0.0.2", ready=False, pod="1")))
    async with gateway(of_service(free_port())) as (_, core):
        member = (await until(lambda: core.pools["p"].endpoints.members))[0]
        await until(lambda: member.reach is Reach.UNREACHABLE and not member.probing and member.probe_due_s)
        for _ in range(3):
            probed_s = member.probed_s
            await until(lambda before=probed_s: member.probed_s > before)  # type: ignore[misc]
            assert core.endpoint_watch._hurry_timer is None
            assert member.probe_due_s - member.probed_s > core.endpoint_watch.waited_for_s


async def test_an_address_that_another_pod_got_begins_anew(cluster: KubernetesApi) -> None:
    async with pod(host="127.0.0.2") as one, gateway(of_service(one.port)) as (port, core), Client(port) as client:
        these = core.pools["p"].endpoints
        cluster.put(piece("a", endpoint("127.0.0.2", pod="1")))
        await until(lambda: these.usable)
        assert (await client.ask(INFER)).status == 200
        old = these[0]
        cluster.put(piece("a", endpoint("127.0.0.2", pod="2")))
        await until(lambda: these[0] is not old)
        assert old.leaving and not these[0].leaving and not these[0].idle
        assert (await client.ask(INFER)).status == 200
        await until(lambda: not these.leaving and not old.idle)
        cluster.put(piece("a", endpoint("127.0.0.2", pod="2", ready=None)))  # the same addresses as before
        cluster.put(piece("b"))
        await until(lambda: len(core.endpoint_watch._services["kubernetes:inference"][0]._table._slices) == 2)
        assert these[0].pod == "2" and not these.leaving


def assigned(these: EndpointSet[HttpEndpoint], *pods: str) -> None:
    these.assign_listed(tuple(Listed(f"10.0.0.{n}", True, pod) for n, pod in enumerate(pods) if pod), 80, probed=True)


def test_after_zero_an_address_has_the_record_of_its_own_pod_only() -> None:
    these = endpoints(1)
    these.assign(())
    these.gone()
    assigned(these, "a", "b", "c")
    first = these[0]
    first.outstanding = 1
    assert these.eject(first, Cause.BROKEN, 10.0)
    assigned(these)
    assert not these.members and len(these.leaving) == 3
    assigned(these, "new", "b")
    assert these[0] is not first and these[0].ejection.cause is None and these[0].reach is Reach.UNKNOWN
    assert these[1].pod == "b" and first in these.leaving
    assigned(these, "a")  # the first endpoint was absent only for a moment
    assert these[0] is first and not first.leaving and first not in these.leaving
    assert len(these.leaving) == 3 and all(member.leaving for member in these.leaving)


async def test_a_service_that_no_document_names_any_more_is_not_watched(cluster: KubernetesApi) -> None:
    cluster.put(piece("a", endpoint("127.0.0.2", pod="1")))
    async with upstream() as up, gateway(of_service(up.port)) as (port, core), Client(port) as client:
        await until(lambda: cluster.watching and len(core.pools["p"].endpoints) == 1)
        plain = replace(core.snapshot.pools["p"], discover=None, endpoints=(("127.0.0.1", up.port),))
        core.adopt(replace(core.snapshot, pools={"p": plain}))
        await until(lambda: not cluster.watching and not core.endpoint_watch._services)
        assert (await client.ask(INFER)).status == 200
        again = replace(plain, discover=("kubernetes:inference", up.port), endpoints=())
        core.adopt(replace(core.snapshot, pools={"p": again}))
        await until(lambda: [member.host for member in core.pools["p"].endpoints] == ["127.0.0.2"])


async def test_one_watch_serves_http_and_grpc(cluster: KubernetesApi) -> None:
    files = of_service(80)
    line = b'discover = "kubernetes:inference:80"'
    files["all.toml"] = files["all.toml"].replace(line, line + b"\ngrpc_" + line.replace(b"80", b"81"))
    cluster.put(piece("a", endpoint("127.0.0.2", pod="1")))
    async with gateway(files) as (_, core):
        gate = core.pools["p"]
        await until(lambda: len(gate.endpoints) == 1 and len(gate.grpc) == 1)
        assert (gate.endpoints[0].port, gate.grpc[0].port) == (80, 81)
        assert cluster.lists == 1 and len(core.endpoint_watch._services) == 1


@pytest.mark.parametrize("kind", ["http", "grpc"])
async def test_a_lost_first_packet_is_not_waited_for(kind: str) -> None:
    """The kernel repeats a first packet after 1 s, 3 s and 7 s; a new attempt to connect gets through at once."""
    async with AsyncExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        waiting = [stack.enter_context(socket.socket()) for _ in range(3)]
        for one in waiting:  # the backlog is full: further connections are neither accepted nor refused
            one.setblocking(False)
            one.connect_ex(listening.getsockname())
        text = documents([listening.getsockname()[1]], pool=f"{PROBED}\nconnect_timeout_ms = 86400000")["all.toml"]
        other = b"grpc_endpoints" if kind == "http" else b"endpoints"
        lines = [line for line in text.split(b"\n") if kind == "grpc" or not line.startswith(other)]
        _, core = await stack.enter_async_context(gateway({"all.toml": b"\n".join(lines)}))
        these: EndpointSet[Any] = core.pools["p"].endpoints if kind == "http" else core.pools["p"].grpc
        these.note_reach(these[0], Reach.UNREACHABLE)
        await until(lambda: these[0].lost_attempts >= 5)
        assert len(these[0].prober._connecting if kind == "http" else these[0]._connecting) <= 2


async def test_a_server_too_busy_to_answer_while_it_starts_is_not_ejected(cluster: KubernetesApi) -> None:
    ready = asyncio.Event()
    async with upstream() as up, gateway(of_service(up.port)) as (port, core), Client(port) as client:

        async def silent(seen: Seen) -> bytes:
            await ready.wait()
            return await up.ok(seen)

        up.answer = silent
        watch, these = core.endpoint_watch, core.pools["p"].endpoints
        watch.probe_timeout_s = 0.01
        cluster.put(piece("a", endpoint("127.0.0.1", ready=False, pod="1")))
        client.send(INFER, b"x", headers=WAKING)
        await until(lambda: these.parked == 1 and these.members)
        missed = partial(lambda: these[0].probed_s)
        for _ in range(6):
            probed_s = missed()
            await until(lambda before=probed_s: missed() > before)  # type: ignore[misc]
        assert these[0].ejection.cause is None
        watch.probe_timeout_s = 60.0
        ready.set()
        assert (await client.reply()).status == 200
