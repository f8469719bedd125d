"""Metrics that Python models define, on the server's metrics port."""

import asyncio
from collections.abc import AsyncIterator
from unittest.mock import patch

import httpx
import pytest
import pytest_asyncio

from oriel_inference.app import Unit, open_unit
from oriel_inference.backends.python import model_metrics
from oriel_inference.backends.python.messages import MakeMetric, UseMetric
from oriel_inference.backends.python.model_metrics import Holdings, ModelMetrics
from oriel_inference.errors import InvalidRequest
from oriel_inference.settings import Settings
from oriel_wire.observe.trace import ListSink

from ..waiting import until
from .python_calls import BEHAVE, ask, put, say

MODEL = BEHAVE + "instance_group [ { count: 2 } ]"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def unit(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Unit]:
    root = tmp_path_factory.mktemp("measured")
    put(root, "measured", "measured", MODEL)
    settings = Settings(repositories=(root,), http_port=0, grpc_port=0, metrics_port=0, control_mode="explicit")
    async with open_unit(settings, sink=ListSink()) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def http(unit: Unit) -> AsyncIterator[httpx.AsyncClient]:
    base = f"http://127.0.0.1:{unit.http_port}/v2"
    async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=60) as client:
        assert (await client.post("/repository/models/measured/load")).status_code == 200
        yield client
        assert (await client.post("/repository/models/measured/unload")).status_code == 200
        await until(lambda: not unit.surface.model_metrics.families)


async def metrics(unit: Unit) -> list[str]:
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"http://127.0.0.1:{unit.metrics_port}/metrics")).text
    return [line for line in text.splitlines() if "of_model" in line]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_models_metrics_are_among_the_servers(unit: Unit, http: httpx.AsyncClient) -> None:
    for _ in range(4):
        await say(http, "add 1.5", model="measured")
    assert await say(http, "add 0", model="measured") == "6.0", "both instances count together"
    await say(http, "set -2", model="measured")
    await say(http, "observe 2", model="measured")
    assert await metrics(unit) == [
        r"# HELP calls_of_model Calls \\ of\nthe model",
        "# TYPE calls_of_model counter",
        "calls_of_model 6.0",
        "# HELP load_of_model Load",
        "# TYPE load_of_model gauge",
        r'load_of_model{of="x\"y"} -2.0',
        "# HELP sizes_of_model Sizes",
        "# TYPE sizes_of_model histogram",
        'sizes_of_model_bucket{le="1.0"} 0',
        'sizes_of_model_bucket{le="2.5"} 1',
        'sizes_of_model_bucket{le="+Inf"} 1',
        "sizes_of_model_count{} 1",
        "sizes_of_model_sum{} 2.0",
    ]


@pytest.mark.asyncio(loop_scope="module")
async def test_metrics_outlive_a_process_and_end_with_their_objects(unit: Unit, http: httpx.AsyncClient) -> None:
    await say(http, "add 3", model="measured")
    for _ in range(2):
        assert (await ask(http, "exit", model="measured")).status_code == 500
    assert await say(http, "add 0", model="measured") == "3.0", "a new process must not make a counter go backwards"
    await say(http, "make here", model="measured")
    assert 'calls_of_model{at="here"} 1.0' in await metrics(unit)
    while 'calls_of_model{at="here"} 1.0' in await metrics(unit):  # one of the two instances has it
        await asyncio.gather(*(say(http, "drop here", model="measured") for _ in range(4)))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("family nv_inference_count", "not begin with a digit, nv_ or oriel_"),
        ("family 1 bad", "it must have letters"),
        ("family calls_of_model", "already exists as a counter: rename it"),
        ("wrong self.all.increment(-1)", "a counter never falls"),
        ("wrong self.all.set(1)", "a counter does not support it"),
        ("wrong self.load.observe(1)", "a gauge does not support it"),
        ("wrong self.sizes.value()", "a histogram does not support it"),
        ("wrong self.load.set(float('nan'))", "must be finite numbers"),
        ("wrong self.calls.Metric({'a b': 'c'})", "labels with valid names"),
        ("wrong self.calls.Metric({'a': 3})", "must be text, not int"),
        ("wrong self.calls.Metric(buckets=[1])", "buckets belong to a histogram"),
        ("wrong self.kinds('h', '', self.kinds.HISTOGRAM).Metric()", "each histogram has them"),
        ("wrong self.kinds('h', '', self.kinds.HISTOGRAM).Metric(buckets=[2, 1])", "buckets must rise"),
        ("wrong self.kinds('h', '', 'counter')", "must be MetricFamily.COUNTER"),
    ],
)
async def test_what_is_no_metric_raises_in_the_model(http: httpx.AsyncClient, text: str, error: str) -> None:
    assert error in await say(http, text, model="measured")


def family(handle: int, name: str, kind: str = "gauge") -> MakeMetric:
    return MakeMetric(1, handle, 0, name, kind)


def metric(handle: int, of: int, **labels: str) -> MakeMetric:
    return MakeMetric(1, handle, of, labels=labels)


def shown(metrics: ModelMetrics) -> dict[str, list[float]]:
    return {name: [each.value for each in found.series.values()] for name, found in metrics.families.items()}  # type: ignore[misc]


def test_a_model_cannot_fill_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_metrics, "MAX_METRICS", 4)
    metrics = ModelMetrics()
    one, other = Holdings(metrics, "m"), Holdings(metrics, "m")
    one.make(family(1, "a"))
    for number in range(3):
        one.make(metric(2 + number, 1, at=str(number)))
    for refused in (family(3, "b"), metric(3, 1, at="9"), metric(4, 1, **{f"l{n}": "" for n in range(17)})):
        with pytest.raises(InvalidRequest):
            other.make(refused)
    with pytest.raises(InvalidRequest):
        other.make(metric(5, 1, at="x" * 257))
    Holdings(metrics, "another").make(family(1, "b"))
    with pytest.raises(InvalidRequest, match="has 4 metric families and metrics already"):
        one.make(family(17, "a"))
    one.use(UseMetric(0, 3, "delete"))
    other.make(family(1, "a"))
    one.use(UseMetric(0, 4, "delete"))
    other.make(metric(6, 1, at="9"))
    one.close()
    other.close()
    assert set(metrics.families) == {"b"}


def test_gauges_that_a_new_process_does_not_make_disappear() -> None:
    metrics = ModelMetrics()
    process = Holdings(metrics, "m")
    for start in range(3):
        process.make(family(1, "c", "counter"))
        process.make(metric(2, 1))
        process.make(family(3, "g"))
        process.make(metric(4, 3, at="always"))
        if not start:
            process.make(metric(5, 3, at="once"))
            process.make(family(6, "lost", "counter"))
            process.make(metric(7, 6))
            process.use(UseMetric(0, 7, "increment", 4.0))
        process.process_ready()
        process.use(UseMetric(0, 2, "increment", 1.0))
        process.use(UseMetric(0, 4, "set", start))
        assert shown(metrics)["c"] == [start + 1] and shown(metrics)["lost"] == [4.0]
        assert shown(metrics)["g"] == ([start] if start else [0, 0])
        process.process_died()
    process.close()
    assert not metrics.families and not metrics.made["m"]


def test_the_metrics_of_other_models_cost_nothing() -> None:
    metrics = ModelMetrics()
    one, other = Holdings(metrics, "one"), Holdings(metrics, "other")
    for each, name in ((one, "a"), (other, "b")):
        each.make(family(1, name))
    with patch.object(metrics.families["b"], "series"):  # nothing of it can be counted or looked through
        for _ in range(model_metrics.MAX_METRICS):
            one.make(metric(2, 1))
            one.use(UseMetric(0, 2, "delete"))
        one.process_died()
        one.process_ready()
        one.close()
    assert list(metrics.families) == ["b"]
