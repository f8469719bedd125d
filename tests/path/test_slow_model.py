"""A model of a server gets slow, and another model of the same server goes on, through the gateway."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic

from fake_backend import FakeBackend, Gate

from oriel_gateway.core import Gateway
from oriel_gateway.ingress.http import ClientConnection
from oriel_gateway.limits import EmbeddedLimiter
from oriel_inference.model import TensorInfo
from oriel_policies.documents import compile_documents
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.observe.trace import ListSink

from ..inference import models
from ..inference.clients import client_of
from ..inference.gated import ROW, gated
from ..waiting import until
from .units import bound, digest

TENSORS = (
    (TensorInfo(name="x", datatype="FP32", shape=(-1, 4)),),
    (TensorInfo(name="y", datatype="FP32", shape=(-1, 4)),),
)
CONFIG = (
    models.DOUBLE
    + """
instance_group [ { count: 1 } ]
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
"""
)
DOCUMENTS = """
[tiers.gold]
band = 0
target_ms = 60000
[pools.models]
learn_concurrency = false
max_inflight = 8
endpoints = ["127.0.0.1:{port}"]
[[routes]]
model = "*"
pool = "models"
[tenants.acme]
tier = "gold"
models = ["*"]
keys = [{{ sha256 = "{digest}" }}]
"""


async def test_a_quick_model_is_answered_while_a_slow_one_of_its_server_is_not(tmp_path: Path) -> None:
    """Twelve calls of the slow model are there, which would fill all eight permits, and none of them ends meanwhile."""
    fake, header = FakeBackend(*TENSORS), {"authorization": "Bearer acme"}
    models.put(tmp_path, "quick", models.double(), CONFIG.replace("double", "quick", 1))
    async with AsyncExitStack() as opened:
        inference, _ = await opened.enter_async_context(gated(tmp_path, fake, CONFIG, cores=4))
        text = DOCUMENTS.format(port=inference.http_port, digest=digest("acme"))
        core = Gateway(compile_documents({"all.toml": text.encode()}), limiter=EmbeddedLimiter(), sink=ListSink())
        opened.push_async_callback(core.close)
        http: HttpServer = HttpServer(HttpLimits())
        await http.open(lambda: ClientConnection(http, core), bound())
        opened.push_async_callback(http.drain, 0.0)
        client = await opened.enter_async_context(client_of(http.port, "/v2/models"))
        for session in fake.sessions:
            session.gate = Gate()
            session.gate.close()
            opened.callback(session.gate.open)
        runs = [len(session.batches) for session in fake.sessions]

        async def call(model: str) -> int:
            return (await client.post(f"/{model}/infer", json=ROW, headers=header)).status_code

        began_s, longest_s = monotonic(), 0.0
        first = asyncio.ensure_future(call("double"))
        began = list(zip(fake.sessions, runs, strict=True))
        gate = await until(lambda: next((each.gate for each, ran in began if len(each.batches) > ran), None))
        for session in fake.sessions:
            if session.gate is not gate:
                session.gate.open()
        while monotonic() - began_s < max(0.2, 10.0 * longest_s):  # so long that it is a slow model by any measure
            asked_s = monotonic()
            assert await call("quick") == 200
            longest_s = max(longest_s, monotonic() - asked_s)
        gate.open()
        assert await first == 200
        gate.close()
        slow = [asyncio.ensure_future(call("double")) for _ in range(12)]
        admission = core.pools["models"].admission
        await until(lambda: admission.inflight + len(admission.queue) == 12)
        assert [await call("quick") for _ in range(100)] == [200] * 100
        assert not any(each.done() for each in slow) and admission.inflight == 7 and len(admission.queue) == 5
        gate.open()
        assert await asyncio.gather(*slow) == [200] * 12
