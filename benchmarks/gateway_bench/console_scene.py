"""A gateway with something to see: tiers, pools in trouble, models, tenants over their limits, calls that are late.

One process: the gateway with its public and admin ports on free ports, servers that answer as the scene says, and
clients. `docs/console.md` shows pictures of it.
"""

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256

from oriel_gateway.admin.app import admin_app
from oriel_gateway.admin.console.live import STREAM, Live, Source
from oriel_gateway.core import Gateway
from oriel_gateway.ingress.http import serve_public
from oriel_gateway.limits import EmbeddedLimiter
from oriel_policies.documents import compile_documents
from oriel_wire.observe.sampling import NEVER
from oriel_wire.observe.trace import NullSink
from oriel_wire.process.control import ControlLimits, serve_control

# model -> (pool, milliseconds, the most that chance adds, provider, mean rows of a batch)
MODELS = {
    "ranker": ("recommend", 18.0, 40.0, "TensorrtExecutionProvider", 27.4),
    "embedder": ("recommend", 24.0, 50.0, "TensorrtExecutionProvider", 18.2),
    "segmenter": ("vision", 70.0, 60.0, "CUDAExecutionProvider", 5.6),
    "detector": ("vision", 38.0, 30.0, "CUDAExecutionProvider", 7.9),
    "classifier": ("vision", 12.0, 8.0, "CUDAExecutionProvider", 11.3),
    "translator": ("language", 160.0, 220.0, "CPUExecutionProvider", 2.1),
    "forecaster": ("tabular", 4.0, 2.0, "OpenVINOExecutionProvider", 31.0),
}
# service -> (pool, milliseconds, the most that chance adds, version)
SERVICES = {"checkout-risk": ("services", 22.0, 20.0, "2"), "search": ("services", 31.0, 30.0, "5")}
# tenant -> (tier, what it calls, calls per second)
TENANTS = {
    "storefront": ("gold", ("ranker", "embedder", "search"), 14.0),
    "payments": ("gold", ("checkout-risk", "forecaster"), 9.0),
    "camera-ops": ("silver", ("detector", "segmenter", "classifier"), 9.0),
    "newsroom": ("silver", ("translator", "embedder"), 3.0),
    "labs": ("bronze", ("segmenter", "translator", "ranker"), 8.0),
    "archive": ("bronze", ("classifier", "embedder"), 6.0),
    "partner-7": ("bronze", ("forecaster",), 5.0),
    "night-batch": ("batch", ("segmenter", "ranker"), 7.0),
}
TIERS = {"gold": (0, 80, 0.99), "silver": (1, 250, 0.98), "bronze": (2, 600, 0.95), "batch": (3, 3000, 0.9)}
# pool -> (servers that answer, servers that do not, permits)
POOLS = {
    "recommend": (3, 0, 24),
    "vision": (2, 1, 3),
    "language": (1, 0, 2),
    "tabular": (2, 0, 16),
    "services": (2, 0, 16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A running gateway with something to show.

    admin, public: the base addresses of its two ports.
    """

    gateway: Gateway
    admin: str
    public: str


def documents(servers: dict[str, list[str]]) -> bytes:
    """The policy documents. servers: the addresses of each pool."""
    lines = []
    for name, (band, target_ms, objective) in TIERS.items():
        lines += [f"[tiers.{name}]", f"band = {band}", f"target_ms = {target_ms}", f"objective = {objective}"]
    for pool, (_, _, permits) in POOLS.items():
        lines += [f"[pools.{pool}]", f"endpoints = {servers[pool]}", f"max_inflight = {permits}"]
        lines += ["learn_concurrency = false", "max_queue = 200"]
    lines += ["[pools.overnight]", "endpoints = []", 'discover = "dns:nowhere.invalid:8000"', "max_inflight = 8"]
    lines += ["[pools.overnight.scaling]", "minimum = 0", "maximum = 4", "start_ms = 20000"]
    for model, (pool, *_) in MODELS.items():
        lines += ["[[routes]]", f'model = "{model}"', f'pool = "{pool}"']
    for service, (pool, *_) in SERVICES.items():
        lines += ["[[routes]]", f'service = "{service}"', f'pool = "{pool}"']
    for tenant, (tier, names, _) in TENANTS.items():
        models, services = [n for n in names if n in MODELS], [n for n in names if n in SERVICES]
        lines += [f"[tenants.{tenant}]", f'tier = "{tier}"', f"models = {models}", f"services = {services}"]
        lines += [f'keys = [{{ sha256 = "{sha256(tenant.encode()).hexdigest()}" }}]']
        if tenant == "partner-7":
            lines += ["limit = { requests_per_s = 3.0, burst = 5, requests_per_day = 200000, concurrency = 8 }"]
            lines += ['budgets = [{ amount = 250, unit = "EUR" }]']
    lines += ["[prices.gpu]", 'class = "gpu"', 'currency = "EUR"', "valid_from = 2026-01-01", 'device_hour = "2.90"']
    lines += ["[prices.cpu]", 'class = "cpu"', 'currency = "EUR"', "valid_from = 2026-01-01", 'device_hour = "0.40"']
    lines += ['cpu_core_hour = "0.05"']
    return "\n".join(lines).replace("'", '"').encode()


class _Server:
    """One server of a pool: it answers probes at once, statistics with the scene's numbers, calls after a while."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._counts: dict[str, int] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # cancelled at the scene's end: its connections end with it
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                length = head.partition("content-length:")[2].partition("\r\n")[0].strip()
                if length:
                    await reader.readexactly(int(length))
                method, path = head.split(" ")[:2]
                writer.write(await self._answer(method, path))
        writer.close()

    async def _answer(self, method: str, path: str) -> bytes:
        name = path.split("/")[3] if path.count("/") > 2 else ""
        if path.endswith("/stats"):
            _, _, _, provider, rows = MODELS[name]
            batches = self._counts[name] = self._counts.get(name, 0) + 100
            body = f'{{"model_stats":[{{"version":"3","inference_count":{int(batches * rows)},'
            body += f'"execution_count":{batches},"last_inference":1}}]}}'
            return _answer(body.encode(), f"x-oriel-provider: {provider}\r\n")
        if method == "get" and name in SERVICES:
            return _answer(f'{{"name":"{name}","version":"{SERVICES[name][3]}"}}'.encode(), "")
        if name in MODELS:
            _, least_ms, more_ms, provider, _ = MODELS[name]
            took_ms = least_ms + more_ms * self._random.random() ** 3
            await asyncio.sleep(took_ms / 1e3)
            queue_ms = took_ms * 0.3 * self._random.random()
            timing = f"queue;dur={queue_ms:.3f}, compute;dur={(took_ms - queue_ms) * 0.9:.3f}"
            device_class = "gpu" if provider.startswith(("Tensorrt", "CUDA")) else "cpu"
            return _answer(b"{}", f"server-timing: {timing}\r\n{_cost(took_ms * 0.2, 0.0, device_class)}")
        if name in SERVICES:
            _, least_ms, more_ms, _ = SERVICES[name]
            took_ms = least_ms + more_ms * self._random.random() ** 3
            await asyncio.sleep(took_ms / 1e3)
            timing = f"logic;dur={took_ms * 0.97:.3f}, logic-pre;dur={took_ms * 0.2:.3f}, "
            timing += (
                f"logic-infer;dur={took_ms * 0.6:.3f}, queue;dur={took_ms * 0.1:.3f}, compute;dur={took_ms * 0.4:.3f}"
            )
            return _answer(b"{}", f"server-timing: {timing}\r\n{_cost(took_ms * 0.1, took_ms * 0.2, 'cpu')}")
        return _answer(b'{"ready":true}', "")


def _cost(device_ms: float, cpu_ms: float, device_class: str) -> str:
    return f"x-oriel-cost: dev={int(device_ms * 1e6)};cpu={int(cpu_ms * 1e6)};class={device_class}\r\n"


def _answer(body: bytes, fields: str) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{fields}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _socket() -> socket.socket:
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    made.listen(512)
    return made


@asynccontextmanager
async def scene(*, token: str | None = None, trace_url: str = "") -> AsyncIterator[Scene]:
    """Run the gateway and its servers; `load` runs the clients."""
    async with contextlib.AsyncExitStack() as stack:
        servers: dict[str, list[str]] = {}
        for number, (pool, (good, bad, _)) in enumerate(POOLS.items()):
            addresses = servers[pool] = []
            for each in range(good):
                server = await asyncio.start_server(_Server(number * 10 + each).serve, "127.0.0.1", 0)
                stack.push_async_callback(_close, server)
                addresses.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
            for _ in range(bad):
                held = stack.enter_context(socket.socket())  # bound and not listening: connections are refused
                held.bind(("127.0.0.1", 0))
                addresses.append(f"127.0.0.1:{held.getsockname()[1]}")
        snapshot = compile_documents({"all.toml": documents(servers)})
        gateway = Gateway(snapshot, limiter=EmbeddedLimiter(), sink=NullSink(), sampling=NEVER)
        public_socket, admin_socket = _socket(), _socket()
        public, admin = public_socket.getsockname()[1], admin_socket.getsockname()[1]
        front = await serve_public(gateway, public_socket)
        live, stop = Live(Source(gateway)), asyncio.Event()
        app = admin_app(gateway, token=token, live=live, trace_url=trace_url)
        limits = ControlLimits(streams=frozenset({STREAM}))
        control = asyncio.create_task(serve_control(app, admin_socket, stop, limits=limits))
        planning = asyncio.create_task(gateway.scaled.run(None))
        try:
            yield Scene(gateway=gateway, admin=f"http://127.0.0.1:{admin}", public=f"http://127.0.0.1:{public}")
        finally:
            live.close()
            stop.set()
            planning.cancel()
            await control
            await front.drain(0.0)
            await gateway.close()


async def _close(server: asyncio.Server) -> None:
    server.close()


async def load(scene: Scene, *, factor: float = 1.0) -> None:
    """Call as the scene's tenants do, until cancelled. factor: of their rates."""
    port = int(scene.public.rpartition(":")[2])
    async with asyncio.TaskGroup() as group:
        for number, (tenant, (_, names, rate)) in enumerate(TENANTS.items()):
            group.create_task(_call(port, group, tenant, names, rate * factor, random.Random(number)))


async def _call(
    port: int, group: asyncio.TaskGroup, tenant: str, names: tuple[str, ...], rate: float, chance: random.Random
) -> None:
    while True:
        await asyncio.sleep(chance.expovariate(rate))
        name = chance.choice(names)
        group.create_task(
            _once(port, f"/v1/services/{name}" if name in SERVICES else f"/v2/models/{name}/infer", tenant)
        )


async def _once(port: int, path: str, tenant: str) -> None:
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        fields = f"host: gateway\r\nauthorization: Bearer {tenant}\r\nconnection: close\r\ncontent-length: 2\r\n\r\n"
        writer.write(f"POST {path} HTTP/1.1\r\n{fields}{{}}".encode())
        await reader.read()
        writer.close()
