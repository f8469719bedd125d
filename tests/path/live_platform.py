"""The three units as processes, with something to see in every metric that a dashboard or an alert names, and a real
Prometheus that reads them.

One gateway serves. Another one, without calls, began during an outage: it reaches neither the store of its documents
nor the ledger of the limits, and its copy of the documents is old.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any

import httpx
import pytest
import yaml
from object_stores import ObjectServer
from redis_server import PASSWORD, RedisServer

from oriel_cli.up.units import free_ports

from ..gateway.certificates import certificate
from ..gateway.stack import digest
from ..inference import models
from ..waiting import until

MONITORING = Path(__file__).resolve().parents[2] / "deploy/chart/monitoring"
SERVICES = {
    "late": """
import asyncio
from oriel_logic import Request, service

@service
async def late(request: Request) -> dict:
    await asyncio.sleep(0.05)
    return {}
""",
    "worked": """
from oriel_logic import Request, service

@service(memory_mb=50)
def worked(request: Request, models, ctx) -> dict:
    with ctx.stage("held"):
        return {"bytes": len(bytearray(int(request.body) << 20)), "sum": sum(range(2_000_000))}
""",
    "together": """
from oriel_logic import Request, batched, service

@batched(max_rows=4, max_delay_ms=20)
def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]

@service
async def together(request: Request, ctx) -> dict:
    [length] = await ctx.run(lengths, [request.body.decode()])
    return {"length": length}
""",
    "blocking": """
import time
from oriel_logic import Request, service

@service
async def blocking(request: Request) -> dict:
    time.sleep(0.3)
    return {}
""",
    "chat": """
from oriel_logic.openai import LanguageModel

chat = LanguageModel(model="parrot", served_as="chat")
""",
    "broken": "from oriel_logic import service\nraise RuntimeError('this service cannot be set up')\n",
}
DOCUMENTS = """
[tiers.gold]
band = 0
target_ms = 2000
give_up_ms = 300000
[tiers.strict]
band = 1
target_ms = 5
give_up_ms = 300000
[pools.logic]
endpoints = ["127.0.0.1:{logic}"]
[pools.models]
endpoints = ["127.0.0.1:{models}"]
learn_concurrency = false
max_inflight = 1
[pools.away]
endpoints = ["127.0.0.1:{nobody}"]
connect_timeout_ms = 200
[pools.cold]
discover = "dns:nowhere.invalid:8000"
max_inflight = 4
[pools.cold.scaling]
minimum = 0
maximum = 2
start_ms = 60000
hold_ms = 300000
[[routes]]
model = "away"
pool = "away"
[[routes]]
model = "cold"
pool = "cold"
[[routes]]
model = "*"
pool = "models"
[[routes]]
service = "*"
pool = "logic"
[prices.cpu]
currency = "EUR"
valid_from = 2026-01-01
cpu_core_hour = 1000000
[tenants.acme]
tier = "gold"
models = ["*"]
services = ["*"]
keys = [{{ sha256 = "{acme}" }}]
limit = {{ requests_per_s = 2000, burst = 2000 }}
[tenants.birch]
tier = "strict"
models = ["*"]
services = ["*"]
keys = [{{ sha256 = "{birch}" }}]
[tenants.cedar]
tier = "gold"
models = ["*"]
keys = [{{ sha256 = "{cedar}" }}]
limit = {{ requests_per_s = 0.1, burst = 1 }}
[tenants.reed]
tier = "gold"
services = ["*"]
keys = [{{ sha256 = "{reed}" }}]
budgets = [{{ amount = "0.000001", unit = "EUR" }}]
"""
OLD_S = 13 * 3600.0  # what the second gateway's documents were confirmed ago
# The engine's double repeats what the user said.
PARROT = 'backend: "language" parameters [ { key: "oriel.engine" value { string_value: "double" } } ]'
TALK = json.dumps({"model": "chat", "stream": True, "messages": [{"role": "user", "content": "it is sunny"}]}).encode()
ROWS = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 512], "data": [0.5] * 512}]}).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """What runs.

    clients: of the serving gateway's public port. prometheus: a client of it.
    store: has the documents. second_models: a model repository. pid: of the serving gateway.
    """

    clients: httpx.AsyncClient
    prometheus: httpx.AsyncClient
    store: ObjectServer
    second_models: Path
    pid: int

    async def ask(self, path: str, **parameters: str) -> Any:
        """Return what Prometheus answers at `/api/v1/PATH`. Raises AssertionError if it refuses the question."""
        answer = (await self.prometheus.get(f"/api/v1/{path}", params=parameters)).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    async def has_read(self) -> None:
        """Wait until Prometheus has read each unit once more."""
        since = time()

        async def read() -> bool:
            found = await self.ask("query", query="timestamp(up) and up == 1")
            return len(found["result"]) == 4 and all(float(each["value"][1]) > since for each in found["result"])

        await until(read)

    def break_off(self) -> None:
        """Put a mistake into the documents, and take the second model repository away."""
        self.store.put("policies/mistaken.toml", b"[tenants.acme]\ntier = 'none'\n")
        os.kill(self.pid, signal.SIGHUP)  # poll the store now
        shutil.rmtree(self.second_models)

    async def call(self, path: str, tenant: str, body: bytes = b"1", timeout_ms: int = 240_000) -> int:
        """Return the status of one call.

        A call that is refused by its head may lose its answer on a machine that is so busy that its body comes when the
        connection is closed already; it is made again.
        """
        fields = {"authorization": f"Bearer key-{tenant}", "x-request-timeout-ms": str(timeout_ms)}
        while True:
            with suppress(httpx.NetworkError, httpx.RemoteProtocolError):
                return (await self.clients.post(path, content=body, headers=fields)).status_code

    async def go_on(self) -> None:
        """Make the calls of a round that cost little: those that are late, batched, for a model, or a chat."""
        late = [self.call("/v1/services/late", "birch") for _ in range(30)]
        together = [self.call("/v1/services/together", "acme", b"text") for _ in range(8)]
        wide, talk = self.call("/v2/models/wide/infer", "acme", ROWS), self.call("/v1/chat/completions", "acme", TALK)
        await asyncio.gather(*late, *together, wide, talk)

    async def traffic(self) -> list[set[int]]:
        """Make one round of calls; returns the statuses of each kind.

        In their order: late; queued; refused by the model server; batched; in a worker; expired while they wait for it;
        beyond a worker's memory; holding the event loop; without a key; over a limit; over a budget; of pools without a
        server.
        """
        late, worked, together = (f"/v1/services/{name}" for name in ("late", "worked", "together"))
        infer = "/v2/models/{}/infer"
        kinds = [
            [self.call(late, "birch") for _ in range(30)],
            [self.call(infer.format("wide"), "acme", ROWS) for _ in range(12)],
            [self.call(infer.format("wide"), "acme", b"{}"), self.call(infer.format("never"), "acme", ROWS)],
            [self.call(together, "acme", b"text") for _ in range(8)],
            [self.call(worked, "acme") for _ in range(4)],
            [self.call(worked, "acme", timeout_ms=40) for _ in range(8)],
            [self.call(worked, "acme", b"200")],
            [self.call("/v1/services/blocking", "acme")],
            [self.call(late, "nobody")],
            [self.call(infer.format("wide"), "cedar", ROWS) for _ in range(3)],
            [self.call(worked, "reed")],
            [self.call(infer.format(name), "acme", ROWS, timeout_ms=500) for name in ("away", "cold")],
        ]
        return [set(await asyncio.gather(*kind)) for kind in kinds]


def prometheus() -> str:
    """The program. ORIEL_TEST_PROMTOOL=1, as for promtool, which is in the same package: a missing one is a failure."""
    found = shutil.which("prometheus")
    if found is None:
        if os.environ.get("ORIEL_TEST_PROMTOOL") == "1":
            pytest.fail("ORIEL_TEST_PROMTOOL=1, and prometheus is not on PATH")
        pytest.skip("prometheus is not on PATH (Debian: apt-get install prometheus)")
    return found


def configure(folder: Path, ports: Mapping[str, list[int]]) -> Path:
    """Write our own configuration and rules with other ports and two seconds between two readings.

    ports: unit -> those with its metrics.
    """
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] |= {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "2s"}
    for job in config["scrape_configs"]:
        addresses = [f"127.0.0.1:{port}" for port in ports[job["job_name"].removeprefix("oriel-")]]
        job["static_configs"] = [{"targets": addresses}]
    shutil.copy(MONITORING / "alerts.yaml", folder)
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def put_models(repository: Path) -> None:
    """A model that serves, one of which only an older version can be loaded, one that cannot be loaded at all, and a
    language model.
    """
    models.put(repository, "wide", models.slow(repeats=20))
    models.put(repository, "older", models.double())
    for name, version in (("older", 2), ("never", 1)):
        folder = repository / name / str(version)
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_bytes(b"this is no model")
    (repository / "parrot" / "1").mkdir(parents=True)
    (repository / "parrot" / "1" / "model.gguf").write_text("the double reads no weights")
    (repository / "parrot" / "config.pbtxt").write_text(PARROT)


@asynccontextmanager
async def running(folder: Path, store: ObjectServer) -> AsyncIterator[Platform]:
    """Start all of it, and end it. folder: an empty one; store: an object store with a bucket."""
    program = prometheus()
    ports = free_ports("127.0.0.1", 15)
    (g_http, g_grpc, g_admin, h_http, h_grpc, h_admin, l_http, l_admin) = ports[:8]
    (i_http, i_grpc, i_metrics, p_port, nobody, nothing, no_redis) = ports[8:]
    keys = {name: digest(f"key-{name}") for name in ("acme", "birch", "cedar", "reed")}
    documents = DOCUMENTS.format(logic=l_http, models=i_http, nobody=nobody, **keys).encode()
    store.put("policies/all.toml", documents)
    services = folder / "services"
    services.mkdir()
    for name, source in SERVICES.items():
        (services / f"{name}.py").write_text(source)
    put_models(folder / "models")
    second_models = folder / "second"
    models.put(second_models, "double", models.double())
    chain, key = certificate(folder, "localhost")  # for two days
    config = configure(folder, {"gateway": [g_admin, h_admin], "logic": [l_admin], "inference": [i_metrics]})

    async with AsyncExitStack() as opened:
        redis = RedisServer()
        opened.push_async_callback(redis.kill)
        await redis.start()

        async def start(name: str, *words: str, **environ: str) -> asyncio.subprocess.Process:
            log = opened.enter_context((folder / f"{name}.log").open("wb"))
            state = {"ORIEL_STATE": str(folder / name), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            process = await asyncio.create_subprocess_exec(
                *words, env=os.environ | state | environ, stdout=log, stderr=log, cwd=folder
            )
            opened.push_async_callback(end, process)
            return process

        def oriel(unit: str, *words: str) -> list[str]:
            return [sys.executable, "-P", "-m", "oriel_cli.main", unit, *words]

        def gateway(limiter: int, http: int, grpc: int, admin: int) -> list[str]:
            flags = ["--policies", f"{store.url}/policies", "--limiter", f"redis://127.0.0.1:{limiter}"]
            flags += ["--http-port", str(http), "--grpc-port", str(grpc), "--admin-port", str(admin)]
            return oriel("gateway", *flags, "--tls-cert", str(chain), "--tls-key", str(key))

        async def ready(base: str, path: str, process: asyncio.subprocess.Process) -> None:
            async with httpx.AsyncClient(base_url=base, trust_env=False) as client:

                async def answers() -> bool:
                    assert process.returncode is None, sorted(each.name for each in folder.glob("*.log"))
                    try:
                        return (await client.get(path)).status_code == 200
                    except httpx.TransportError:
                        return False

                await until(answers)

        # Prometheus takes no spans, so that they are lost.
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{p_port}", "ORIEL_LIMITER_PASSWORD": PASSWORD}
        environ |= store.environment(store.port) | {"NO_PROXY": "127.0.0.1"}
        first = await start("first", *gateway(redis.port, g_http, g_grpc, g_admin), **environ)
        logic = oriel("logic", "--services", str(services), "--http-port", str(l_http), "--admin-port", str(l_admin))
        logic += ["--inference", f"127.0.0.1:{i_http}", "--inference-grpc", f"127.0.0.1:{i_grpc}", "--workers", "1"]
        served = await start("logic", *logic)
        inference = oriel("inference", "--model-repository", str(folder / "models"))
        inference += ["--model-repository", str(second_models), "--strict-readiness", "false"]
        inference += ["--model-control-mode", "poll", "--repository-poll-secs", "1"]
        inference += ["--http-port", str(i_http), "--grpc-port", str(i_grpc), "--metrics-port", str(i_metrics)]
        inferred = await start("inference", *inference)
        await ready(f"http://127.0.0.1:{g_admin}", "/health/ready", first)
        await ready(f"http://127.0.0.1:{l_admin}", "/health/ready", served)
        await ready(f"http://127.0.0.1:{i_http}", "/v2/health/ready", inferred)

        shutil.copytree(folder / "first", folder / "second-state", symlinks=True)
        for confirmed in (folder / "second-state").rglob(".confirmed"):
            os.utime(confirmed, (time() - OLD_S, time() - OLD_S))
        away = environ | {"ORIEL_STATE": str(folder / "second-state")} | store.environment(nothing)
        second = await start("second-gateway", *gateway(no_redis, h_http, h_grpc, h_admin), **away)
        data = ["--storage.tsdb.path", str(folder / "data"), "--log.level", "warn"]
        listen = ["--web.listen-address", f"127.0.0.1:{p_port}"]
        scraping = await start("prometheus", program, "--config.file", str(config), *data, *listen)
        await ready(f"http://127.0.0.1:{p_port}", "/-/ready", scraping)
        await ready(f"http://127.0.0.1:{h_admin}", "/health/live", second)
        base = f"https://127.0.0.1:{g_http}"
        clients = await opened.enter_async_context(
            httpx.AsyncClient(base_url=base, verify=False, trust_env=False, timeout=300)
        )
        asking = await opened.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{p_port}", trust_env=False, timeout=60)
        )
        platform = Platform(clients=clients, prometheus=asking, store=store, second_models=second_models, pid=first.pid)
        held = asyncio.create_task(platform.call("/v2/models/cold/infer", "acme", timeout_ms=290_000))
        try:
            yield platform
        finally:
            held.cancel()
            with suppress(asyncio.CancelledError):
                await held


async def end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 30)
        except TimeoutError:
            process.kill()
            await process.wait()
