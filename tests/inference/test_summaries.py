"""Quantiles of latencies on the metrics port, and the latencies that `--metrics-config` leaves out."""

from dataclasses import replace
from math import isnan

import pytest

from oriel_inference.app import open_unit
from oriel_inference.metrics_choice import QUANTILES, MetricsChoice, from_metrics_config
from oriel_inference.settings import Settings
from oriel_wire.errors import StartFailed
from oriel_wire.observe.summary import SLICE_S, SLICES, Summary
from oriel_wire.observe.trace import ListSink

from .clients import client_of
from .exposed import Read, families, read

ONES = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
DOUBLE = {"model": "double", "version": "1"}


def test_quantiles_are_those_of_the_latest_minute_within_one_percent() -> None:
    summary = Summary()
    summary.observe(10.0, 0.0, 10_000)
    later = SLICE_S * SLICES
    for us in range(1, 1001):
        summary.observe((us + 0.1) / 1e6, later)
    assert list(summary.quantiles((0.0, 0.5, 0.99, 1.0), later)) == pytest.approx([1, 500, 990, 1000], rel=0.0101)
    assert (summary.count, summary.total_us) == (11_000, 10_000 * 10_000_000 + 500_500)
    assert all(map(isnan, summary.quantiles((0.5, 0.9), 3 * later)))


async def test_the_metrics_port_shows_the_latencies_that_were_chosen(settings: Settings) -> None:
    chosen = MetricsChoice(counters=False, histograms=False, quantiles=(0.5, 0.99))
    async with open_unit(replace(settings, metrics=chosen), sink=ListSink()) as unit:
        async with client_of(unit.http_port) as client:
            for _ in range(3):
                assert (await client.post("/v2/models/double/infer", json=ONES)).status_code == 200
        assert not [
            name
            for name in await families(unit)
            if name.endswith(("_duration_us", "_duration_per_model", "histogram_ms"))
        ]
        for found in (Read(await families(unit)), await read(unit)):
            for name in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
                family = f"nv_inference_{name}_summary_us"
                half, most = (found.value(family, quantile=each, **DOUBLE) for each in ("0.5", "0.99"))
                assert found.value(f"{family}_count", **DOUBLE) == 3 and 0 <= half <= most
                assert found.value(f"{family}_sum", **DOUBLE) >= 0


def test_flags_choose_latencies() -> None:
    assert from_metrics_config(["summary_latencies=true"]) == MetricsChoice(quantiles=QUANTILES)
    given = ["summary_quantiles=0.99:0.001,0.5:0.05", "summary_latencies=1", "counter_latencies=false"]
    assert from_metrics_config([*given, "histogram_latencies=off"]) == MetricsChoice(False, False, (0.5, 0.99))


@pytest.mark.parametrize("text", ["summary_latencies=maybe", "latencies=true", "summary_quantiles=1.5", "a"])
def test_wrong_values_stop_the_start(text: str) -> None:
    with pytest.raises(StartFailed, match="--metrics-config"):
        from_metrics_config([text])
