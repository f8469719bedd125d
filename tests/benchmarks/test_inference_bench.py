"""The rules of the inference benchmark: what counts as failed, how a verdict is found, and that its page shows the
results.
"""

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from harness.load import Failed, read_wrk
from inference_bench import report
from inference_bench.closed_loop import read_h2load, variants
from inference_bench.models import MODELS, write
from inference_bench.targets import grpc_target, http_target
from inference_bench.workloads import IN_PROCESS, Measured

from oriel_wire.v2.http import decode_request

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


def test_the_page_names_misses_as_misses() -> None:
    measured = Measured("encoder-grpc", {"oriel": "raw"}, pss_mb={"oriel": 99.4}, left_out={"mlserver": "no package"})
    turn = {"cpu_us": 10.0, "p50_ms": 1.0, "p99_ms": 2.0}
    alone = {"rate": 100.0, "cpu_us": 9.0, "best_batch": 64.0}
    measured.runs = {64: {IN_PROCESS: [alone], "oriel": [{"rate": 90.0, **turn}]}}
    text = report.as_markdown(json.loads(json.dumps(report.as_document([measured], threads=1, seconds=2, rounds=1))))
    assert "| 5 ms model over gRPC: rate beside in-process: at least 0.95 x | 0.90 x | MISSED |" in text
    assert "in-process ONNX Runtime, batches of 64" in text
    assert "Left out: mlserver: no package" in text


def test_variants_are_requests_of_the_same_kind() -> None:
    whole = b'{"inputs":[{"name":"x","datatype":"INT64","shape":[1,3],"data":[7,8,9]}]}'
    found = [json.loads(body)["inputs"][0]["data"] for body in variants(whole)]
    assert all(sorted(data) == [7, 8, 9] and all(type(each) is int for each in data) for data in found)
    assert variants(b"no JSON") == [b"no JSON"]
