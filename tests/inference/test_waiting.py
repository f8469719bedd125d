"""What a request holds while it waits.

Thousands may wait. The garbage collector walks each of their objects, and these are out of the processor's caches when
their turn comes, so the number of objects decides what a long queue costs.
"""

import gc
import json
import sys

from oriel_inference.catalog import ServingModel
from oriel_inference.dataplane.dataplane import Completion, Dataplane
from oriel_wire.context import read_headers
from oriel_wire.v2.http import decode_request
from oriel_wire.v2.messages import InferRequest
from oriel_wire.v2.proto import model_config_pb2 as pb

from .bench import Bench, spec


def request() -> InferRequest:
    tensor = {"name": "x", "shape": [1, 2], "datatype": "INT64", "parameters": {"binary_data_size": 16}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return decode_request("double", "", head + bytes(16), len(head))


class One:
    """A catalog of one model."""

    def __init__(self, serving: ServingModel) -> None:
        self._serving = serving

    def get(self, name: str, version: str = "") -> ServingModel:
        return self._serving


def test_a_request_that_waits_holds_what_its_batch_and_its_answer_need() -> None:
    bench = Bench(spec())
    bench.call()
    bench.clock.run()  # the instance is busy
    serving = ServingModel(spec(), pb.ModelConfig(), bench.batcher, bench.sessions, 0.0)
    dataplane = Dataplane(One(serving), bench.clock.now)  # type: ignore[arg-type]
    ended: list[Completion] = []

    def submit() -> None:
        ctx = read_headers({}.get, trusted=True).at(bench.clock.now(), 60.0)
        dataplane.infer(request(), ctx, size_bytes=100, reply=ended.append, on_caller_left=ended.append)

    submit()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(100):
        submit()
    gc.collect()
    assert len(gc.get_objects()) - before <= 100 * 10  # 18 when closures kept all of it
    bench.settle()
    assert len(ended) == 101 and all(each.error is None for each in ended)


def test_parameters_that_were_taken_out_leave_no_table_behind() -> None:
    decoded = request()
    assert not decoded.parameters and not decoded.inputs[0].parameters
    assert sys.getsizeof(decoded.parameters) == sys.getsizeof(decoded.inputs[0].parameters) == sys.getsizeof({})
