"""The alerts on the promise of a tier: when they fire, when they clear, and that they keep quiet."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from .promtool import counter, run_cases

OUTAGE, FAST, HIGH = PAGES = ("OrielTierFails", "OrielBudgetBurnFast", "OrielBudgetBurnHigh")
BOTH = (FAST, HIGH)
SLOW, STEADY = TICKETS = ("OrielBudgetBurnSlow", "OrielBudgetBurnSteady")
# Alert -> the factor and the windows of its summary.
BURN = {FAST: "14.4 1h 5m", HIGH: "6 6h 30m", SLOW: "3 1d 2h", STEADY: "1 3d 6h"}
# (samples, calls met and calls not met from one sample to the next)
Traffic = list[tuple[int, float, float]]


@pytest.fixture(scope="module")
def groups(tree: Path) -> list[dict[str, Any]]:
    found = yaml.safe_load((tree.parent / "deploy/chart/monitoring/alerts.yaml").read_text())["groups"]
    return [group for group in found if group["name"].startswith("oriel-slo")]


@pytest.fixture
def paging(groups: Any) -> list[dict[str, Any]]:
    """Only the group with the pages: windows of days cost promtool minutes."""
    (found,) = [group for group in groups if group["name"] == "oriel-slo"]
    return [found]


def series(traffic: Traffic, objective: float, tier: str = "gold") -> list[dict[str, str]]:
    """What Prometheus reads from two gateways that share the traffic."""
    found = []
    for pod in ("a", "b"):
        labels = f'tier="{tier}", pod="{pod}"'
        parts = {"met": [(n, met / 2) for n, met, _ in traffic], "missed": [(n, bad / 2) for n, _, bad in traffic]}
        for result, part in parts.items():
            name = f'oriel_gateway_attainment_total{{{labels}, result="{result}"}}'
            found.append({"series": name, "values": counter(part)})
        samples = sum(count for count, _, _ in traffic)
        found.append({"series": f"oriel_gateway_tier_objective{{{labels}}}", "values": f"{objective}x{samples}"})
    return found


def expected(name: str, tier: str = "gold") -> dict[str, Any]:
    if name == OUTAGE:
        summary = f"More than half of the calls of tier {tier} fail or are late, over 2m and 1m."
    else:
        factor, long, short = BURN[name].split()
        summary = f"Tier {tier} uses its error budget at {factor} times the rate it was given, over {long} and {short}."
    severity = "page" if name in PAGES else "ticket"
    return {
        "exp_labels": {"severity": severity, "tier": tier},
        "exp_annotations": {"summary": summary, "runbook_url": f"docs/runbooks.md#{name.lower()}"},
    }


def at(minute: int, *firing: str, of: tuple[str, ...] = PAGES) -> list[dict[str, Any]]:
    """Check that of the alerts `of` exactly those in `firing` fire."""
    return [
        {"alertname": name, "eval_time": f"{minute}m", "exp_alerts": [expected(name)] if name in firing else []}
        for name in of
    ]


def case(traffic: Traffic, objective: float, *checks: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    found = [each for check in checks for each in check]
    return {"input_series": series(traffic, objective), "alert_rule_test": found, **more}


def never_paged(time: str) -> dict[str, Any]:
    """A check that no page has fired up to this time."""
    return {"expr": f'count_over_time(ALERTS{{severity="page"}}[{time}])', "eval_time": time, "exp_samples": []}


def test_a_plain_outage_pages_within_two_minutes_and_clears(paging: Any, tmp_path: Path) -> None:
    """At objectives up to 0.93 no page could fire, as 14.4 times the budget was more than all calls."""
    minute = 4  # samples: Prometheus reads the gateway every 15 s
    outage = [(15 * minute, 30, 0), (4 * minute, 0, 30), (7 * minute, 30, 0)]
    checks = (at(15), at(17, OUTAGE, of=(OUTAGE,)), at(21, of=(OUTAGE,)), at(25, of=(OUTAGE, FAST)))
    cases = [case(outage, objective, *checks) for objective in (0.5, 0.9, 0.93, 0.99, 0.999)]
    run_cases(tmp_path, paging, cases, every="15s")


def test_a_budget_that_burns_pages_over_its_two_windows_and_clears(paging: Any, tmp_path: Path) -> None:
    """At an objective of 0.9 the threshold is 0.9 of all calls, not 1.44; six times the budget is 0.6 of them.

    Samples are a minute apart, too far for the alert on a plain outage.
    """
    hour = 60  # samples
    fast = [(3 * hour, 120, 0), (hour, 100, 20), (hour // 2, 120, 0)]
    high = [(hour, 120, 0), (6 * hour, 111, 9), (hour, 120, 0)]
    wide = [(hour, 120, 0), (5 * hour, 3, 117), (hour // 2, 120, 0)]
    cases = [
        case(fast, 0.99, at(180, of=BOTH), at(238, FAST, of=BOTH), at(247, of=BOTH)),
        case(high, 0.99, at(60, of=BOTH), at(418, HIGH, of=BOTH), at(460, of=BOTH)),
        case(
            *(wide, 0.9, at(60, of=BOTH), at(119, FAST, of=BOTH), at(359, FAST, HIGH, of=BOTH)),
            *(at(366, HIGH, of=BOTH), at(389, of=BOTH)),
        ),
    ]
    run_cases(tmp_path, paging, cases, every="1m")


def test_slow_burns_are_tickets(groups: Any, tmp_path: Path) -> None:
    """Samples every 30 minutes: windows below two hours see nothing here."""
    hour, day = 2, 48  # samples
    slow = [(day, 3600, 0), (day, 3474, 126), (4 * hour, 3600, 0)]
    steady = [(day, 3600, 0), (3 * day, 3546, 54), (8 * hour, 3600, 0)]
    checks = at(24 * 60, of=TICKETS), at(47 * 60, SLOW, STEADY, of=TICKETS), at(51 * 60, STEADY, of=TICKETS)
    cases = [
        case(slow, 0.99, *checks),
        case(steady, 0.99, at(24 * 60, of=TICKETS), at(95 * 60, STEADY, of=TICKETS), at(103 * 60, of=TICKETS)),
    ]
    run_cases(tmp_path, groups, cases, every="30m")


@pytest.mark.parametrize(("outage", "every", "samples"), [(True, "30s", 120), (False, "4m", 15)])
def test_two_quiet_days_have_no_page(paging: Any, tmp_path: Path, outage: bool, every: str, samples: int) -> None:
    """A third of the budget goes in one burst an hour, by day and by night; nobody is woken.

    The longest window of a page is six hours, so that two days show every hour of the day with all that is before it.
    The alert on an outage is tried apart, with the close samples that it needs. samples: in an hour.
    """
    (group,) = paging
    rules = [rule for rule in group["rules"] if (rule.get("alert") == OUTAGE) == outage]
    random, traffic = Random(7), []
    for hour in range(2 * 24):
        calls = (7200.0 if 8 <= hour % 24 < 20 else 600.0) / samples
        begins, bad = random.randrange(1, samples - 1), min(15.0, calls / 2)
        traffic += [(begins, calls, 0.0), (1, calls - bad, bad), (samples - 1 - begins, calls, 0.0)]
    quiet = case(traffic, 0.99, promql_expr_test=[never_paged("2d")])
    run_cases(tmp_path, [{**group, "rules": rules}], [quiet], every=every)


def test_a_quiet_hour_has_no_page(paging: Any, tmp_path: Path) -> None:
    """Two calls each five minutes fail, eight in all, which is most of what there is and no reason to wake anybody."""
    minute = 2  # samples
    few = [each for _ in range(12) for each in ((1, 1.0, 0.0), (5 * minute - 1, 0.0, 0.0))]
    failing = [each for _ in range(4) for each in ((1, 0.0, 2.0), (5 * minute - 1, 0.0, 0.0))]
    traffic = [*few, *failing, *few]
    run_cases(tmp_path, paging, [case(traffic, 0.999, promql_expr_test=[never_paged("140m")])], every="30s")


def test_the_series_of_sloth_are_recorded(groups: Any, tmp_path: Path) -> None:
    """`tier` is ours beside sloth's labels. The budget of 30 days is that of calls: a quiet night counts little."""
    sloth = 'sloth_id="oriel-gold", sloth_service="oriel", sloth_slo="gold", tier="gold"'
    traffic = [(60, 396.0, 4.0), (60, 0.0, 0.0)]
    values = {
        f'slo:sli_error:ratio_rate5m{{{sloth}, sloth_window="5m"}}': 0.01,
        f'slo:sli_error:ratio_rate30m{{{sloth}, sloth_window="30m"}}': 0.01,
        f'slo:sli_error:ratio_rate1h{{{sloth}, sloth_window="1h"}}': 0.01,
        f'slo:sli_error:ratio_rate2h{{{sloth}, sloth_window="2h"}}': 0.01,
        f'slo:sli_error:ratio_rate6h{{{sloth}, sloth_window="6h"}}': 0.01,
        f'slo:sli_error:ratio_rate1d{{{sloth}, sloth_window="1d"}}': 0.01,
        f'slo:sli_error:ratio_rate3d{{{sloth}, sloth_window="3d"}}': 0.01,
        f'slo:sli_error:ratio_rate30d{{{sloth}, sloth_window="30d"}}': 0.01,
        f"slo:objective:ratio{{{sloth}}}": 0.96,
        f"slo:error_budget:ratio{{{sloth}}}": 0.04,
        f"slo:time_period:days{{{sloth}}}": 30,
        f"slo:current_burn_rate:ratio{{{sloth}}}": 0.25,
        f"slo:period_burn_rate:ratio{{{sloth}}}": 0.25,
        f"slo:period_error_budget_remaining:ratio{{{sloth}}}": 0.75,
    }
    checks = [
        {
            "expr": f"round({name.partition('{')[0]}, 0.0001)",
            "eval_time": "59m",
            "exp_samples": [{"labels": "{" + name.partition("{")[2], "value": value}],
        }
        for name, value in values.items()
    ]
    run_cases(tmp_path, groups, [case(traffic, 0.96, promql_expr_test=checks)], every="1m")
