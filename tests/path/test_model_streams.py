"""`models.stream` of the logic server against Oriel's own inference server and a decoupled model."""

from pathlib import Path
from time import monotonic

import numpy as np
from fake_backend import FakeBackend

from oriel_inference.app import open_unit
from oriel_inference.model import TensorInfo
from oriel_inference.settings import Settings
from oriel_logic.client.upstreams import Upstreams
from oriel_logic.observe.stages import Ledger
from oriel_wire.context import CallContext
from oriel_wire.observe.trace import ListSink, new_trace

COUNT = """
backend: "fake" model_transaction_policy { decoupled: true }
input [ { name: "n" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "i" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""


async def test_every_answer_of_a_decoupled_model_comes(tmp_path: Path) -> None:
    (tmp_path / "count" / "1").mkdir(parents=True)
    (tmp_path / "count" / "1" / "model.onnx").write_bytes(b"")
    (tmp_path / "count" / "config.pbtxt").write_text(COUNT)
    number = (TensorInfo(name="n", datatype="INT32", shape=(1,)),)
    backend = FakeBackend(number, (TensorInfo(name="i", datatype="INT32", shape=(1,)),), decoupled=True)
    settings = Settings(repositories=(tmp_path,), http_port=0, grpc_port=0, metrics_port=0, cores=1)
    sink = ListSink()
    async with open_unit(settings, backends=lambda name: backend, sink=sink) as unit:
        upstreams = Upstreams([("127.0.0.1", unit.http_port)], [("127.0.0.1", unit.grpc_port)])
        await upstreams.start()
        trace = new_trace(True)
        call = CallContext(
            request_id="r-1", deadline=monotonic() + 30, tier="gold", band=1, tenant="acme", models=(), trace=trace
        )
        models = upstreams.servers.bind(call, Ledger(trace))
        assert await models.ready("count")
        found = [int(each["i"][0]) async for each in models.stream("count", {"n": np.array([40], np.int32)})]
        await upstreams.close()
    assert found == list(range(40))
    assert {span.context.trace_id for span in sink.spans} == {trace.trace_id}
