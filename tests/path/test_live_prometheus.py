"""A real Prometheus reads the whole platform with our configuration: every panel and every rule has data.

No expression needs a GPU or Kubernetes. An alert has data while its condition holds; `NOT_HERE` has the exceptions.
"""

import json
import logging
from collections.abc import Iterator
from functools import partial
from math import isfinite
from pathlib import Path
from time import time
from typing import Any

import pytest
import yaml
from object_stores import ObjectServer, object_server

from ..conftest import Run
from ..gateway.certificates import needs_openssl
from ..waiting import until
from .draw_dashboards import filled
from .live_platform import MONITORING, Platform, running

# Alerts whose condition does not hold here, and a metric of the same server, which has to be there. The first two need
# a full disk, which this machine has no spare one for. A reference and a canary's verdict need hundreds of calls, and
# no server comes and goes; promtool judges these alerts.
NOT_HERE = {
    "OrielUsageNotWritten": "oriel_usage_ledger_failures_total",
    "OrielUsageLost": "oriel_usage_ledger_lost_total",
    "OrielModelDrift": "oriel_model_sampled_rows_total",
    "OrielCanaryRolledBack": "oriel_gateway_cache_bytes",
    "OrielServersComeAndGo": "oriel_gateway_endpoints_usable",
}


def panels() -> dict[str, dict[str, Any]]:
    """Return the panels of all dashboards, by the names of both."""
    boards = {file.stem: json.loads(file.read_text())["panels"] for file in (MONITORING / "dashboards").iterdir()}
    return {f"{name}: {each['title']}": each for name, all_ in boards.items() for each in all_ if each["type"] != "row"}


def expressions() -> dict[str, str]:
    """Return every query of a dashboard, and of every rule what it records or the condition of its alert."""
    found = {
        f"{name}: {target['refId']}": filled(target["expr"], "20s")
        for name, panel in panels().items()
        for target in panel["targets"]
    }
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            found[rule.get("record") or rule["alert"]] = rule.get("record") or rule["expr"]
    return found | NOT_HERE


@pytest.fixture
def store(run: Run) -> Iterator[ObjectServer]:
    with object_server("s3", run) as server:
        yield server


async def missing(platform: Platform, asked: dict[str, str], since: float) -> dict[str, str]:
    """Return those expressions that have had no number since then."""
    window = {"start": str(since), "end": str(time()), "step": "1"}
    left = {}
    for name, expression in asked.items():
        found = await platform.ask("query_range", query=expression, **window)
        if not any(isfinite(float(value)) for series in found["result"] for _, value in series["values"]):
            left[name] = expression
    return left


async def none_is_empty(platform: Platform, since: float) -> bool:
    """Make some calls; tell if by then every panel has data, or text that says why it has none."""
    await platform.go_on()
    await platform.has_read()
    left = await missing(platform, expressions(), since)
    empty = {
        name
        for name, panel in panels().items()
        if "noValue" not in panel["fieldConfig"]["defaults"]
        and all(f"{name}: {target['refId']}" in left for target in panel["targets"])
    }
    logging.warning("without data: %s", empty)  # the last one tells what was waited for in vain
    return not empty


def rules_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [rule for group in answer["groups"] for rule in group["rules"]]


@needs_openssl
@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_every_panel_and_every_rule_has_data(tmp_path: Path, store: ObjectServer) -> None:
    """Rounds come in pairs, because a rate needs a counter that grows between two readings."""
    since = time()
    async with running(tmp_path, store) as platform:
        await platform.has_read()
        await until(partial(none_is_empty, platform, since))
        for _ in range(2):
            statuses = await platform.traffic()
            assert statuses[:2] == [{200}, {200}] and statuses[8] == {401} and 429 in statuses[9], statuses
            await platform.has_read()
        platform.break_off()
        left = expressions()
        assert len(left) > 90
        absent = {"one that nothing exposes": 'oriel_gateway_waiting{pool="nobody"}'}
        assert await missing(platform, absent, since) == absent

        quiet: set[str] = set()

        async def complete() -> bool:
            nonlocal left, quiet
            # Alerts hold, and rates have two readings between which they grow, as long as there is traffic.
            await platform.go_on()
            await platform.has_read()
            left = await missing(platform, left, since)
            rules = rules_of(await platform.ask("rules"))
            quiet = {rule["name"] for rule in rules if rule["type"] == "alerting" and rule["state"] == "inactive"}
            quiet -= NOT_HERE.keys()
            return not left and not quiet

        try:
            await until(complete)
        except TimeoutError:
            read = await platform.ask("query", query="{__name__=~'oriel_request.*_count|up'}[10m]")
            shown = f"without data: {json.dumps(left, indent=2)}\nalerts that do not hold: {quiet}"
            pytest.fail(f"{shown}\nwhat was read: {json.dumps(read['result'])}")
        rules = rules_of(await platform.ask("rules"))
        assert {rule["name"] for rule in rules} <= expressions().keys() and {rule["health"] for rule in rules} == {"ok"}
