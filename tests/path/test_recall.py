"""Which traces of three real units reach a collector while each keeps one trace in a hundred from its beginning."""

import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from stacks import EXAMPLES, Stack, key, started
from tritonclient.grpc import InferenceServerClient, InferInput

from ..otlp_receiver import Receiver, attributes, receiving
from ..waiting import pipe_gate, wait_until

SERVICE = """
import json

import numpy as np
from oriel_logic import service

GATES = GATES_FOLDER

def pass_gate(name):
    with open(GATES + "/" + name, "rb", 0) as gate:
        gate.read(1)

@service
async def probe(request, models, ctx):
    asked = request.json()
    await models.infer("digits", {"image": np.zeros((1, 64), np.float32)})
    if "gate" in asked:
        await ctx.run(pass_gate, asked["gate"])
    if "fail" in asked:
        raise ZeroDivisionError
    return asked
"""
# Nobody can keep the promise of gold, nobody can break that of bronze.
TIERS = """
[tiers.gold]
band = 0
target_ms = 1
give_up_ms = 600000
[tiers.bronze]
band = 1
target_ms = 600000
give_up_ms = 600000
"""
TENANT = """
[tenants.TIER]
tier = "TIER"
keys = [{ sha256 = "DIGEST" }]
models = ["*"]
services = ["*"]
"""
ALL = {"gateway", "logic", "inference"}
# By the last 14 digits of its id a trace is kept from its beginning, at a ratio of 0.01 from fd70a3d70a3d71 on.
KEPT, NOT_KEPT = "f" * 14, "0" * 14
_numbers = count(1)


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as server:
        yield server


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gates")


@pytest.fixture(scope="module")
def stack(receiver: Receiver, gates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("recall")
    for name in ("services", "policies"):
        (folder / name).mkdir()
    (folder / "services" / "probe.py").write_text(SERVICE.replace("GATES_FOLDER", repr(str(gates))))
    tenants = [
        TENANT.replace("TIER", tier).replace("DIGEST", sha256(f"oriel-demo-{tier}".encode()).hexdigest())
        for tier in ("gold", "bronze")
    ]
    (folder / "policies" / "all.toml").write_text(TIERS + "".join(tenants))
    shutil.copy(EXAMPLES.parent / "policies" / "examples" / "routes.toml", folder / "policies")
    words = [
        *("--policies", str(folder / "policies"), "--services", str(folder / "services")),
        *("--model-repository", str(EXAMPLES / "models")),
    ]
    tracing = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
        "OTEL_TRACES_SAMPLER": "traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.01",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
        "NO_PROXY": "127.0.0.1",
    }
    with started(folder / "state", words, tracing) as running:
        yield running


def trace_id(end: str) -> str:
    return f"{next(_numbers):018x}{end}"


def post(stack: Stack, tier: str, trace: str, path: str = "/v1/services/probe", **asked: Any) -> httpx.Response:
    headers = {**key(tier), "traceparent": f"00-{trace}-{'1' * 16}-00"}
    url, body = f"{stack.base}{path}", asked.pop("body", None) or asked
    return httpx.post(url, json=body, headers=headers, timeout=600, trust_env=False)


def spans_of(receiver: Receiver, trace: str, units: set[str]) -> dict[str, list[Any]]:
    """Wait until the spans of these units have come."""
    wait_until(lambda: units <= set(receiver.by_unit(trace)))
    return receiver.by_unit(trace)


def is_whole(spans: dict[str, list[Any]]) -> bool:
    """Return whether each span but the gateway's own hangs on another one of the trace."""
    every = [span for found in spans.values() for span in found]
    ids = {span.span_id for span in every}
    return len(ids) == len(every) and sum(span.parent_span_id not in ids for span in every) == 1


def outermost(spans: dict[str, list[Any]]) -> dict[str, Any]:
    (root,) = [span for span in spans["gateway"] if span.kind == span.SPAN_KIND_SERVER]
    return attributes(root)


def test_an_on_time_request_is_kept_by_its_id_alone(stack: Stack, receiver: Receiver) -> None:
    on_time, kept = trace_id(NOT_KEPT), trace_id(KEPT)
    assert post(stack, "bronze", on_time).status_code == 200
    assert post(stack, "bronze", kept).status_code == 200
    spans = spans_of(receiver, kept, ALL)
    assert is_whole(spans) and outermost(spans)["oriel.kept"] == "ratio"
    # Each unit sends its spans in order, and would have sent those of the earlier request before.
    assert not receiver.by_unit(on_time)


@pytest.mark.parametrize(
    ("tier", "asked", "status", "kept"),
    [("gold", {}, 200, "sla"), ("bronze", {"fail": True}, 500, "error")],
    ids=["late", "failed"],
)
def test_a_late_and_a_failed_request_are_kept_whole(
    stack: Stack, receiver: Receiver, tier: str, asked: dict[str, Any], status: int, kept: str
) -> None:
    trace = trace_id(NOT_KEPT)
    assert post(stack, tier, trace, **asked).status_code == status
    spans = spans_of(receiver, trace, ALL)
    assert is_whole(spans) and outermost(spans)["oriel.kept"] == kept
    names = {unit: {span.name for span in found} for unit, found in spans.items()}
    assert names["gateway"] == {"POST /v1/services/{service}", "POST"} <= names["logic"]
    assert {"POST /v2/models/{model}/infer", "compute"} <= names["inference"]


def test_a_late_request_without_a_service_is_kept_whole(stack: Stack, receiver: Receiver) -> None:
    trace = trace_id(NOT_KEPT)
    tensor = {"name": "image", "shape": [1, 64], "datatype": "FP32", "data": [0.0] * 64}
    answer = post(stack, "gold", trace, "/v2/models/digits/infer", body={"inputs": [tensor]})
    assert answer.status_code == 200
    assert is_whole(spans_of(receiver, trace, {"gateway", "inference"}))


def test_a_late_grpc_call_is_kept_whole(stack: Stack, receiver: Receiver) -> None:
    """The inference server was asked at its gRPC port over HTTP/1.1, which it does not speak."""
    trace = trace_id(NOT_KEPT)
    image = InferInput("image", [1, 64], "FP32")
    image.set_data_from_numpy(np.zeros((1, 64), np.float32))
    with InferenceServerClient(stack.address("gateway", "grpc")) as client:
        client.infer("digits", [image], headers={**key("gold"), "traceparent": f"00-{trace}-{'1' * 16}-00"})
    spans = spans_of(receiver, trace, {"gateway", "inference"})
    assert is_whole(spans) and outermost(spans)["oriel.kept"] == "sla"
    (served,) = [span for span in spans["inference"] if span.kind == span.SPAN_KIND_SERVER]
    port = int(stack.address("inference", "grpc").rpartition(":")[2])
    assert (served.name, attributes(served)["server.port"]) == ("inference.GRPCInferenceService/ModelInfer", port)


def test_a_request_whose_deadline_passes_is_kept(stack: Stack, receiver: Receiver, gates: Path) -> None:
    trace = trace_id(NOT_KEPT)
    with pipe_gate(gates / "expired"):
        headers = {**key("gold"), "traceparent": f"00-{trace}-{'1' * 16}-00", "x-request-timeout-ms": "400"}
        url = f"{stack.base}/v1/services/probe"
        answer = httpx.post(url, json={"gate": "expired"}, headers=headers, timeout=600, trust_env=False)
        assert answer.status_code == 504
        spans = spans_of(receiver, trace, {"gateway", "logic"})
    found = outermost(spans)
    assert (found["oriel.sla.result"], found["oriel.kept"]) in (("missed", "sla"), ("missed", "error"))


def test_every_exemplar_names_a_trace_that_the_collector_has(stack: Stack, receiver: Receiver) -> None:
    """Of two requests in the same buckets one is late and kept, the other is not."""
    for number in range(20):
        assert post(stack, ("gold", "bronze")[number % 2], trace_id(NOT_KEPT)).status_code == 200
    for unit, port, names in (
        ("gateway", "admin", {"oriel_gateway_request_duration_seconds_bucket", "oriel_gateway_slo_bad_total"}),
        ("inference", "metrics", {"oriel_request_duration_seconds_bucket"}),
    ):
        # A counter begins at 0 in its first scrape, and shows an exemplar from the second one on.
        wait_until(lambda unit=unit, port=port, names=names: exemplars(stack, unit, port).keys() == names)
        for trace in set().union(*exemplars(stack, unit, port).values()):
            wait_until(lambda trace=trace, unit=unit: unit in receiver.by_unit(trace))


def test_a_unit_that_was_restarted_meanwhile_loses_only_its_own_spans(
    stack: Stack, receiver: Receiver, gates: Path
) -> None:
    trace = trace_id(NOT_KEPT)
    with pipe_gate(gates / "restarted") as let_pass, ThreadPoolExecutor(1) as threads:
        called = executions(stack)
        answer = threads.submit(post, stack, "gold", trace, gate="restarted")
        wait_until(lambda: executions(stack) > called)
        os.kill(stack.unit("inference")["pid"], signal.SIGKILL)
        wait_until(lambda: executions(stack) == 0)  # it is there again, with new counters
        let_pass()
        assert answer.result().status_code == 200
    spans = spans_of(receiver, trace, {"gateway", "logic"})
    assert set(spans) == {"gateway", "logic"} and is_whole(spans)
    wait_until(lambda: counter(stack, "logic", "admin", "oriel_trace_recalled_total", result="gone") >= 1)

    def served() -> str:
        """Return the trace of an answered request. One that comes before the new server is connected is refused."""
        after = trace_id(NOT_KEPT)
        return after if post(stack, "gold", after).status_code == 200 else ""

    assert is_whole(spans_of(receiver, wait_until(served), ALL))


def executions(stack: Stack) -> float:
    """Return the batches of `digits` that the inference server has run; -1 while it does not answer."""
    try:
        return counter(stack, "inference", "metrics", "nv_inference_exec_count_total", model="digits")
    except httpx.TransportError:
        return -1.0


def counter(stack: Stack, unit: str, port: str, name: str, **labels: str) -> float:
    text = httpx.get(f"http://{stack.address(unit, port)}/metrics", timeout=60, trust_env=False).text
    families: Sequence[Any] = list(text_string_to_metric_families(text))
    found = [each for family in families for each in family.samples if each.name == name]
    return sum(each.value for each in found if labels.items() <= each.labels.items())


def exemplars(stack: Stack, unit: str, port: str) -> dict[str, set[str]]:
    """Return the names of samples with exemplars, and the traces of these."""
    accept = {"accept": "application/openmetrics-text"}
    text = httpx.get(f"http://{stack.address(unit, port)}/metrics", headers=accept, timeout=60, trust_env=False).text
    families: Sequence[Any] = list(parse_openmetrics(text))
    found = dict[str, set[str]]()
    for sample in [each for family in families for each in family.samples if each.exemplar is not None]:
        found.setdefault(sample.name, set()).add(sample.exemplar.labels["trace_id"])
    return found
