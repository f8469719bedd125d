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

import httpx
import pytest

from .. import waiting
from .conftest import Shared
from .machine import EXAMPLES, KEY, REPOSITORY, Machine, answers, tenants
from .objects import Object, objects, of, pods

LATER = "a-key-of-birch"
START_S = 120


def planned(shared: Shared, *keys: str, services: dict[str, str]) -> list[Object]:
    return objects(
        shared,
        infrastructure={"redis_url": None, "redis_tls": False, "redis_auth_secret_ref": None},
        gpu_enabled=False,
        model_groups={"cpu": {"accelerator": "cpu", "repository": REPOSITORY}},
        policies={"tenants": tenants(*keys)},
        logic={"services": services, "workers": 1},
    )


@contextlib.asynccontextmanager
async def running(machine: Machine, found: list[Object], client: httpx.AsyncClient) -> AsyncIterator[dict[str, Path]]:
    """All units, ready by their planned probes; each unit's folder of its ConfigMap."""
    configs, folders = of(found, "ConfigMap"), {}
    processes = [await asyncio.create_subprocess_exec(*machine.redis(pods(found)["redis"]), stdout=DEVNULL)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ORIEL_", "OTEL_"))}
    try:
        for unit in UNITS:
            template = pods(found)[unit]
            mounts = machine.mount(unit, template, configs)
            folders.update({name: mounts[path] for name, path in CONFIGS.items() if path in mounts})
            words, environment = machine.command(unit, template, mounts)
            # Nothing but what is mounted may be written: the home is not.
            environment |= {
                "HOME": "/nonexistent",
                "TMPDIR": str(mounts["/tmp"]),
                "PYTHONPATH": os.pathsep.join(sys.path),
            }
            processes.append(await asyncio.create_subprocess_exec(*words, env=kept | environment))
        for unit in UNITS:
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                url = machine.probe(pods(found)[unit], kind)
                await until(lambda url=url: answers(client, url, 200), processes)
        yield folders
    finally:
        for process in processes:
            if process.returncode is None:
                process.terminate()
        ended = [await asyncio.wait_for(process.wait(), 60) for process in processes]
    assert ended == [0, 0, 0, 0]


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
        async with running(machine, planned(shared, KEY, services=services), client) as folders:
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
            for name, folder in folders.items():
                machine.publish(folder, of(after, "ConfigMap")[name]["data"])

            async def echoed() -> bool:
                headers = {"x-api-key": LATER}
                said = await client.post(f"{base}/v1/services/echo", json={"word": "hello"}, headers=headers)
                return said.status_code == 200 and said.text == "hello"

            await until(echoed)
            assert (await digit(LATER)).json()["label"] == 7


ECHO = """from oriel_logic import service


@service
async def echo(word: str) -> str:
    return word
"""


@pytest.fixture(autouse=True)
def needs_a_runtime() -> None:
    pytest.importorskip("onnxruntime")
