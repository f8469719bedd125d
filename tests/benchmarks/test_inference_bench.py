"""The rules of the inference benchmark: what counts as failed, how a verdict is found, and that its page shows the
results.
"""

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from fake_backend import FakeSession, Gate
from harness.load import Failed, read_wrk
from inference_bench import goodput_report, report
from inference_bench.closed_loop import read_h2load, variants
from inference_bench.contenders import BATCHING, repository
from inference_bench.goodput import Outcome, as_document
from inference_bench.goodput_cells import Cell, Deadlines
from inference_bench.models import MODELS, write
from inference_bench.serve import FifoBatcher
from inference_bench.targets import grpc_target, http_target
from inference_bench.workloads import IN_PROCESS, Measured

from oriel_inference.batching.call import Answer, Call
from oriel_inference.batching.cores import Cores
from oriel_inference.batching.machine import Machine
from oriel_inference.clock import VirtualClock
from oriel_inference.model import ModelSpec, QueueRules, TensorInfo, TensorSpec
from oriel_policies.waiting.batch import BatchBounds
from oriel_wire.v2.http import decode_request

from ..inference.manual_workers import ManualWorkers

WRK = """Running 1s test @ http://127.0.0.1:1/
  Latency Distribution
     50%   85.00us
     75%  230.00us
     90%    0.95ms
     99%    1.06s
  6192 requests in 1.10s, 3.20MB read
Requests/sec:   5629.11
"""
H2LOAD = """finished in 1.00s, 100.00 req/s, 1.00KB/s
requests: 100 total, 164 started, 100 done, 100 succeeded, 0 failed, 0 errored, 0 timeout
status codes: 100 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 10.00KB (10240) total, 2.00KB (2048) headers (space savings 90.00%), {data} data
"""
LOG = "".join(f"1000{number}\t200\t{number * 1000}\n" for number in range(1, 101))


def test_wrk_is_read_in_its_units() -> None:
    run = read_wrk(WRK, "x")
    assert (run.requests, run.rate, run.p50_ms, run.p99_ms) == (6192, 5629.11, 0.085, 1060.0)


@pytest.mark.parametrize(
    "line", ["Non-2xx or 3xx responses: 3", "Socket errors: connect 0, read 1, write 0, timeout 0"]
)
def test_failed_http_requests_end_the_bench(line: str) -> None:
    with pytest.raises(Failed, match="x failed requests"):
        read_wrk(f"{WRK}  {line}\n", "x")


def test_calls_whose_answers_lack_their_message_end_the_bench() -> None:
    good = H2LOAD.format(data="2.93KB (3000)")
    run = read_h2load(good, LOG, "x", 8, answer_bytes=25)
    assert (run.requests, run.rate, run.p50_ms, run.p99_ms) == (100, 100.0, 51.0, 100.0)
    for old, new in (("(3000)", "(2970)"), ("(3000)", "(9000)"), ("0 failed", "1 failed")):
        with pytest.raises(Failed, match="x failed calls"):
            read_h2load(good.replace(old, new), LOG, "x", 8, answer_bytes=25)


def test_every_model_takes_its_row_at_any_batch(tmp_path: Path) -> None:
    for name in ("tiny", "image"):
        model = MODELS[name]
        session = ort.InferenceSession(str(write(model, tmp_path / f"{name}.onnx")), providers=["CPUExecutionProvider"])
        [one] = session.run(None, {"x": model.row()})
        [two] = session.run(None, {"x": np.concatenate([model.row()] * 2)})
        assert one.shape == (1, *model.outputs)
        assert np.allclose(two, np.concatenate([one, one]), atol=1e-4)


def test_requests_hold_the_row() -> None:
    model = MODELS["tiny"]
    for binary in (False, True):
        target = http_target("x", 1, "/v2/models/tiny/infer", model, binary=binary)
        length = dict(target.headers).get("inference-header-content-length")
        request = decode_request("tiny", "", target.body, None if length is None else int(length))
        assert np.array_equal(request.inputs[0].array, model.row())
    assert model.row().tobytes() in grpc_target("x", 1, model).body


def test_copies_of_a_model_differ_in_their_batching_alone(tmp_path: Path) -> None:
    file = write(MODELS["tiny"], tmp_path / "m.onnx")
    folder = repository(tmp_path / "r", MODELS["tiny"], file, "onnxruntime", 2, {"a": BATCHING, "b": "other {}"})
    texts = [(folder / name / "config.pbtxt").read_text() for name in ("a", "b")]
    assert texts[0].replace('"a"', '"b"').replace(BATCHING, "other {}") == texts[1]
    assert (folder / "b" / "1" / "model.onnx").read_bytes() == file.read_bytes()


def test_targets_are_ratios_of_medians() -> None:
    measured = Measured("tiny-http")
    measured.runs = {
        64: {
            "oriel": [{"rate": rate, "cpu_us": 50.0, "p99_ms": 1.0} for rate in (90.0, 120.0, 500.0)],
            "triton-python": [{"rate": 100.0, "cpu_us": 100.0, "p99_ms": 1.0}],
            "mlserver": [{"rate": 20.0, "cpu_us": 1.0, "p99_ms": 1.0}],
        }
    }
    by_text = {verdict.target: (verdict.found, verdict.met) for verdict in report.verdicts([measured])}
    assert by_text["tiny over HTTP: rate beside Triton Python: at least 1.2 x"] == ("1.20 x", True)
    assert by_text["tiny over HTTP: rate beside MLServer: at least 8 x"] == ("6.00 x", False)
    assert by_text["tiny over HTTP: CPU beside Triton Python: at most 0.7 x"] == ("0.50 x", True)
    assert by_text["tiny over HTTP, 1 connection: p50 beside Triton: at most 1 x"] == ("not measured", None)


def cell(goodput: float | None) -> Cell:
    tiers = {"gold": goodput, "bronze": goodput}
    return Cell(
        goodput=goodput,
        by_tier=tiers,
        objection=None,
        p99_ms=tiers,
        refused={},
        refused_ms={},
        generator_busy=0.1,
        lag_p99_ms=1.0,
    )


def outcome(own: float | None, expired: int = 0) -> Outcome:
    made = Outcome("mlp", 1000.0, 37.0, Deadlines(gold=74, bronze=222), executed=10, expired_executed=expired)
    made.cells[("poisson", 1.5)] = {
        "oriel": {0: [cell(own)]},
        "fifo": {5000: [cell(200.0)]},
        "triton-python": {0: [cell(300.0)], 5000: [cell(450.0)]},
    }
    return made


def test_goodput_is_held_against_the_fifo_and_tritons_best_delay() -> None:
    document = json.loads(json.dumps(as_document([outcome(401.0, expired=1)])))
    assert [(found, met) for _, found, met in goodput_report.verdicts(document)] == [
        ("2.00 x", True),
        ("0.89 x", False),
        ("1 of 10", False),
    ]
    unknown = json.loads(json.dumps(as_document([outcome(None)])))
    assert [met for _, _, met in goodput_report.verdicts(unknown)] == [None, None, True]


def test_the_page_names_misses_as_misses() -> None:
    measured = Measured("encoder-grpc", {"oriel": "raw"}, pss_mb={"oriel": 99.4}, left_out={"mlserver": "no package"})
    turn = {"cpu_us": 10.0, "p50_ms": 1.0, "p99_ms": 2.0}
    alone = {"rate": 100.0, "cpu_us": 9.0, "best_batch": 64.0}
    measured.runs = {64: {IN_PROCESS: [alone], "oriel": [{"rate": 90.0, **turn}]}}
    text = report.as_markdown(json.loads(json.dumps(report.as_document([measured], threads=1, seconds=2, rounds=1))))
    assert "| 5 ms model over gRPC: rate beside in-process: at least 0.95 x | 0.90 x | MISSED |" in text
    assert "in-process ONNX Runtime, batches of 64" in text
    assert "Left out: mlserver: no package" in text


def test_the_fifo_knows_neither_deadlines_nor_tiers() -> None:
    x = TensorInfo(name="x", datatype="INT64", shape=(-1, 1))
    spec = ModelSpec(
        name="double",
        version=1,
        platform="",
        backend="fake",
        max_batch_size=2,
        inputs=(TensorSpec(name="x", datatype="INT64", dims=(1,)),),
        outputs=(TensorSpec(name="y", datatype="INT64", dims=(1,)),),
        bounds=BatchBounds(max_rows=2, max_delay_s=0.005),
        queue=QueueRules(),
        instances=1,
    )
    clock, workers = VirtualClock(), ManualWorkers()
    session = FakeSession((x,), (TensorInfo(name="y", datatype="INT64", shape=(-1, 1)),), gate=Gate())
    fifo = FifoBatcher(spec, [session], Machine(clock=clock, cores=Cores(1), workers=workers, inline_s=0.0))
    answered: list[int] = []

    def arrive(number: int, band: int, timeout_s: float) -> None:
        fifo.submit(
            Call(
                inputs={"x": np.full((1, 1), number)},
                rows=1,
                signature=None,
                arrived_s=clock.now(),
                deadline=clock.now() + timeout_s,
                band=band,
                reply=lambda result: answered.append(number if isinstance(result, Answer) else -number),
            )
        )

    for number, (band, timeout_s) in enumerate([(1, 9.0), (0, 0.01), (1, 0.02), (0, 1.0), (1, 0.001)], 1):
        arrive(number, band, timeout_s)
    for _ in range(3):
        clock.advance(1.0)
        workers.run_all()
    clock.advance(1.0)
    assert answered == [1, 2, 3, 4, 5]
    assert session.batches == [2, 2, 1]


def test_variants_are_requests_of_the_same_kind() -> None:
    whole = b'{"inputs":[{"name":"x","datatype":"INT64","shape":[1,3],"data":[7,8,9]}]}'
    found = [json.loads(body)["inputs"][0]["data"] for body in variants(whole)]
    assert all(sorted(data) == [7, 8, 9] and all(type(each) is int for each in data) for data in found)
    assert variants(b"no JSON") == [b"no JSON"]
