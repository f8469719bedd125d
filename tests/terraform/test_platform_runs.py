"""The whole path without a cluster: the three units run as real processes with the arguments, the environment, the
documents and the mounts of the plan, and a client with a key gets an answer through the gateway.

What stands in for Kubernetes: names and ports lead to loopback, folders of the pods to folders here, the model
repository's URL to the examples. Pods that a watch of EndpointSlices would find are looked up by name, for there is no
API server (tests/wire/test_endpoint_slices.py has one). ConfigMaps lie as the kubelet lays them: links through
`..data`, swapped as a whole.
"""

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from .. import waiting
from .conftest import Shared
from .machine import EXAMPLES, KEY, REPOSITORY, TLS_SECRET, Machine, answers, tenants
from .objects import Object, objects, of, pods

LATER = "a-key-of-birch"
START_S = 120


def planned(
    shared: Shared,
    *keys: str,
    services: dict[str, str],
    cloud: str = "aws",
    documents: dict[str, str] | None = None,
    **variables: Any,
) -> list[Object]:
    return objects(
        shared,
        infrastructure={"cloud": cloud, "redis_url": None, "redis_tls": False, "redis_auth_secret_ref": None},
        gpu_enabled=False,
        model_groups={"cpu": {"accelerator": "cpu", "repository": REPOSITORY}},
        policies={"tenants": tenants(*keys), "documents": documents or {}},
        logic={"services": services, "workers": 1},
        **variables,
    )


class Cluster:
    """The units of a plan as processes. folders: each unit's folder of its ConfigMap."""

    def __init__(self, machine: Machine, found: list[Object], client: httpx.AsyncClient) -> None:
        self.folders: dict[str, Path] = {}
        self._machine, self._found, self._client = machine, found, client
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self, *units: str) -> None:
        """Start units, and wait until they are ready by their planned probes."""
        configs = of(self._found, "ConfigMap")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ORIEL_", "OTEL_"))}
        if not self._processes:
            words = self._machine.redis(pods(self._found)["redis"])
            self._processes.append(await asyncio.create_subprocess_exec(*words, stdout=DEVNULL))
        for unit in units:
            template = pods(self._found)[unit]
            mounts = self._machine.mount(unit, template, configs)
            self.folders.update({name: mounts[path] for name, path in CONFIGS.items() if path in mounts})
            words, environment = self._machine.command(unit, template, mounts)
            # Nothing but what is mounted may be written: the home is not.
            environment |= {
                "HOME": "/nonexistent",
                "TMPDIR": str(mounts["/tmp"]),
                "PYTHONPATH": os.pathsep.join(sys.path),
            }
            self._processes.append(await asyncio.create_subprocess_exec(*words, env=kept | environment))
        for unit in units:
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                url = self._machine.probe(pods(self._found)[unit], kind)
                await until(lambda url=url: answers(self._client, url, 200), self._processes)

    async def stop(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.terminate()
        ended = [await asyncio.wait_for(process.wait(), 60) for process in self._processes]
        assert ended == [0] * len(ended)


@contextlib.asynccontextmanager
async def running(
    machine: Machine, found: list[Object], client: httpx.AsyncClient, *units: str
) -> AsyncIterator[Cluster]:
    """Redis and these units, ready; all of them if none are named."""
    cluster = Cluster(machine, found, client)
    try:
        await cluster.start(*(units or UNITS))
        yield cluster
    finally:
        await cluster.stop()


UNITS = ("inference-cpu", "logic", "gateway")
CONFIGS = {"policies": "/etc/oriel/policies", "services": "/etc/oriel/services"}


async def says(client: httpx.AsyncClient, url: str, line: str) -> bool:
    return line in (await client.get(url)).text.splitlines()


async def until(
    holds: Callable[[], Awaitable[bool]], processes: list[asyncio.subprocess.Process] | None = None
) -> None:
    async def holds_while_all_run() -> bool:
        assert all(process.returncode is None for process in processes or ()), "a unit ended; why is on stderr"
        return await holds()

    await waiting.until(holds_while_all_run, START_S)


async def test_the_planned_objects_run_and_answer_and_take_changes(shared: Shared, tmp_path: Path) -> None:
    services = {"digits.py": (EXAMPLES / "services" / "digits.py").read_text()}
    machine = Machine(tmp_path)
    picture = (EXAMPLES / "digits" / "7.png").read_bytes()
    async with httpx.AsyncClient(timeout=30) as client:
        async with running(machine, planned(shared, KEY, services=services), client) as cluster:
            base = f"http://127.0.0.1:{machine.port(8080)}"

            async def digit(key: str) -> httpx.Response:
                headers = {"authorization": f"Bearer {key}", "content-type": "image/png"}
                return await client.post(f"{base}/v1/services/digits", content=picture, headers=headers)

            answer = await digit(KEY)
            assert answer.status_code == 200 and answer.json()["label"] == 7, answer.text
            ready = await client.get(f"{base}/v2/models/digits/ready", headers={"x-api-key": KEY})
            assert ready.status_code == 200
            # What is broken, or not whole yet, took nobody else away (all models of a start, and no pod is ever ready).
            inside = f"http://127.0.0.1:{machine.port(8000)}/v2/models"
            assert [await answers(client, f"{inside}/{name}/ready", 200) for name in ("digits", "half", "broken")] == [
                True, False, False
            ]  # fmt: skip
            assert (await digit(LATER)).status_code == 401
            metrics = f"http://127.0.0.1:{machine.port(8082)}/metrics"
            await until(lambda: says(client, metrics, "oriel_gateway_limiter_up 1.0"))
            # What probes and scrapes get of the admin port, whoever asks.
            for path, status in (("/metrics", 200), ("/health/live", 200), ("/policies", 401)):
                url = f"http://127.0.0.1:{machine.port(8082)}{path}"
                assert await answers(client, url, status, host="10.0.0.9:8082")

            # A tenant and a service more: ConfigMaps change, pods do not.
            services["echo.py"] = ECHO
            after = planned(shared, KEY, LATER, services=services)
            for name, folder in cluster.folders.items():
                machine.publish(folder, of(after, "ConfigMap")[name]["data"])

            async def echoed() -> bool:
                headers = {"x-api-key": LATER}
                said = await client.post(f"{base}/v1/services/echo", json={"word": "hello"}, headers=headers)
                return said.status_code == 200 and said.text == "hello"

            await until(echoed)
            assert (await digit(LATER)).json()["label"] == 7


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
async def test_a_call_over_tls_waits_for_services_and_models_that_have_no_pod(
    shared: Shared, tmp_path: Path, cloud: str
) -> None:
    services = {"digits.py": (EXAMPLES / "services" / "digits.py").read_text()}
    machine, scaled = Machine(tmp_path), {"keda": {"enabled": True}, "gateway": {"tls_secret": TLS_SECRET}}
    # A request that has reached a logic server waits for its model within its own time, which covers a start here.
    tiers = {"tiers.toml": "[tiers.gold]\nband = 0\ntarget_ms = 100000\ngive_up_ms = 100000\n"}
    found = planned(shared, KEY, services=services, cloud=cloud, documents=tiers, **scaled)
    assert {name: each["spec"]["minReplicaCount"] for name, each in of(found, "ScaledObject").items()} == {
        "logic": 0, "inference-cpu": 0
    }  # fmt: skip
    picture = (EXAMPLES / "digits" / "7.png").read_bytes()
    headers = {"authorization": f"Bearer {KEY}", "content-type": "image/png"}
    async with httpx.AsyncClient(timeout=START_S, verify=False) as client:
        async with running(machine, found, client, "gateway") as cluster:
            base, admin = f"https://127.0.0.1:{machine.port(8080)}", f"http://127.0.0.1:{machine.port(8082)}"
            call = asyncio.create_task(client.post(f"{base}/v1/services/digits", content=picture, headers=headers))
            for pool, unit in (("logic", "logic"), ("inference-cpu", "inference-cpu")):
                line = f'oriel_gateway_waiting_for_endpoint{{pool="{pool}"}} 1.0'
                await until(lambda line=line: says(client, f"{admin}/metrics", line))
                assert not call.done()
                await cluster.start(unit)
            answer = await call
            assert answer.status_code == 200 and answer.json()["label"] == 7, answer.text
            plain = await client.get(base.replace("https", "http"))
            assert plain.status_code == 400, "the public port speaks TLS only"


ECHO = """from oriel_logic import service


@service
async def echo(word: str) -> str:
    return word
"""


@pytest.fixture(autouse=True)
def needs_a_runtime() -> None:
    pytest.importorskip("onnxruntime")
