"""KEDA's questions without a cluster: the planned gateway runs with its planned arguments and documents, and a stand-in
for KEDA asks it what the planned ScaledObjects say. No group has a pod until a call for one of its models has woken it.

The Kubernetes API is a scripted one; it is found in place of the cluster's.
"""

import asyncio
import os
import re
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from oriel_wire.discovery.endpoint_slices import ACCOUNT
from oriel_wire.v2.proto.external_scaler_pb2 import ScaledObjectRef

from ..gateway.keda import Keda, keda
from ..gateway.pods import pod
from ..waiting import until
from ..wire.kubernetes_api import KubernetesApi, endpoint, kubernetes, piece
from .conftest import Shared
from .machine import KEY, Machine, answers, tenants
from .objects import Object, matches, objects, of, pods

GROUPS = {
    "chat": {"accelerator": "cpu", "models": ["chat-*"]},
    "rest": {"accelerator": "cpu"},
}
# The place of the API server and of the pod's account are the only things that the gateway is not told by arguments.
PRELUDE = """import pathlib, sys
from oriel_wire.discovery.endpoint_slices import ApiServer, EndpointSlices
EndpointSlices.__init__.__kwdefaults__["api"] = lambda: ApiServer({url!r}, pathlib.Path({account!r}))
from oriel_cli.main import main
sys.exit(main())
"""
BODY = b'{"inputs":[]}'


class Cluster(Machine):
    """Services keep their names, which the scripted API server is asked for; only Redis is found by name here."""

    def text(self, text: str) -> str:
        def moved(match: re.Match[str]) -> str:
            name = "localhost" if match[1] == "redis" else match[1]
            return f"{name}:{self.port(int(match[2]))}"

        return re.sub(r"\b(logic|inference-chat|inference-rest|redis):([0-9]+)\b", moved, text)


@asynccontextmanager
async def gateway(machine: Machine, found: list[Object], client: httpx.AsyncClient) -> AsyncIterator[KubernetesApi]:
    """The planned gateway and Redis, ready by the planned probe, and the API server that it watches."""
    template = pods(found)["gateway"]
    mounts = machine.mount("gateway", template, of(found, "ConfigMap"))
    words, environment = machine.command("gateway", template, mounts)
    account = mounts[str(ACCOUNT)]
    processes = [await asyncio.create_subprocess_exec(*machine.redis(pods(found)["redis"]), stdout=DEVNULL)]
    async with kubernetes(account) as (api, where):
        code = PRELUDE.format(url=where.url, account=str(account))
        start = words.index("oriel_cli.main") + 1
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ORIEL_", "OTEL_"))}
        try:
            processes.append(
                await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-c", code, *words[start:]),
                    env=kept | environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
                )
            )

            async def ready() -> bool:
                assert all(process.returncode is None for process in processes), "it ended; why is on stderr"
                return await answers(client, machine.probe(template, "readinessProbe"), 200)

            await until(ready, 120)
            yield api
        finally:
            for process in processes:
                if process.returncode is None:
                    process.terminate()
            ended = [await asyncio.wait_for(process.wait(), 60) for process in processes]
    assert ended == [0, 0]


def scaled_objects(found: list[Object]) -> dict[str, ScaledObjectRef]:
    """What KEDA sends of each ScaledObject: its name, and all that its trigger says."""
    return {
        name: ScaledObjectRef(
            name=name,
            namespace=each["metadata"]["namespace"],
            scalerMetadata=each["spec"]["triggers"][0]["metadata"],
        )
        for name, each in of(found, "ScaledObject").items()
    }


def scaler_port(found: list[Object], machine: Machine, asked: ScaledObjectRef) -> int:
    """Follow the address of a trigger through the Service to the port of a gateway's container."""
    host, _, port = asked.scalerMetadata["scalerAddress"].partition(":")
    service = of(found, "Service")[host.split(".")[0]]
    assert host.split(".")[1:] == [service["metadata"]["namespace"], "svc", "cluster", "local"]
    template = pods(found)["gateway"]
    assert matches(service["spec"]["selector"], template["metadata"]["labels"])
    (entry,) = [each for each in service["spec"]["ports"] if each["port"] == int(port)]
    assert entry["targetPort"] in [each["containerPort"] for each in template["spec"]["containers"][0]["ports"]]
    return machine.port(entry["targetPort"])


async def test_a_call_for_a_group_at_zero_wakes_this_group_and_is_answered_by_its_first_pod(
    shared: Shared, tmp_path: Path
) -> None:
    found = objects(
        shared,
        infrastructure={"redis_url": None, "redis_tls": False, "redis_auth_secret_ref": None},
        gpu_enabled=False,
        scale_to_zero=True,
        keda={"enabled": True},
        model_groups=GROUPS,
        policies={"tenants": tenants(KEY)},
    )
    machine, asked = Cluster(tmp_path), scaled_objects(found)
    assert set(asked) == {"logic", "inference-chat", "inference-rest"}
    (port,) = {scaler_port(found, machine, each) for each in asked.values()}
    async with httpx.AsyncClient(timeout=200) as client, gateway(machine, found, client) as api, keda(port) as operator:
        infer = f"http://127.0.0.1:{machine.port(8080)}/v2/models/chat-small/infer"
        headers = {"authorization": f"Bearer {KEY}", "x-request-timeout-ms": "200000"}
        targets = {each.scalerMetadata["target"]: name for name, each in asked.items()}
        async with operator.listening(*asked.values()):
            await until(lambda: len(operator.states) == 3 and all(operator.states.values()))
            assert await answer(operator, asked) == dict.fromkeys(asked, (1.0, 0.0, False))

            call = asyncio.create_task(client.post(infer, content=BODY, headers=headers))
            await until(lambda: any(True in states for states in operator.states.values()))
            woken = {targets[target] for target, states in operator.states.items() if True in states}
            assert woken == {"inference-chat"}
            assert await answer(operator, asked) == dict.fromkeys(asked, (1.0, 0.0, False)) | {
                "inference-chat": (1.0, 1.0, True)
            }
            assert not call.done()

            async with pod(port=machine.port(8000)):  # what KEDA would start
                api.put(piece("first", endpoint("127.0.0.1", pod="1"), service="inference-chat"))
                assert (await call).status_code == 200
            # Nobody without a key wakes anything.
            stranger = await client.post(infer.replace("chat-small", "digits"), content=BODY)
            assert stranger.status_code == 401
            assert True not in operator.states[asked["inference-rest"].scalerMetadata["target"]]


async def answer(operator: Keda, asked: dict[str, ScaledObjectRef]) -> dict[str, tuple[float, float, bool]]:
    return {name: await operator.poll(each) for name, each in asked.items()}
