"""`oriel usage`: sums stay whole however they are grouped, priced and written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_cli.errors import CommandFailed
from oriel_cli.main import main
from oriel_cli.usage.command import read_prices
from oriel_cli.usage.grouping import IDLE, billed_twice, group, hours
from oriel_cli.usage.reading import collect, moment
from oriel_policies.metering.prices import Price, amounts, decimal_text, price_at
from oriel_policies.metering.reconcile import DeviceHour
from oriel_wire.usage.files import UsageFiles
from oriel_wire.usage.lines import COUNTERS, UsageLine

from .usage_lines import BASE, GPU, PRICES, device, line

LINES = st.lists(
    st.builds(
        line,
        st.sampled_from(["a", "b", ""]),
        st.integers(0, 10**12),
        target=st.sampled_from(["m", "n"]),
        minute=st.sampled_from(["2026-11-24T17:05", "2026-11-24T18:00", "2026-11-25T00:00"]),
        requests=st.integers(0, 100),
        rows=st.integers(0, 100),
    ),
    max_size=30,
)


@given(LINES, st.lists(st.sampled_from(["tenant", "target", "day", "hour", "class", "why"]), min_size=1, unique=True))
def test_groups_add_up_to_the_lines_however_they_are_made(lines: list[UsageLine], by: list[str]) -> None:
    groups = group(lines, by)
    for name in COUNTERS:
        assert sum(each.sums[name] for each in groups) == sum(getattr(each, name) for each in lines)


@given(LINES, st.integers(0, 10**12))
def test_idle_time_that_is_spread_is_charged_as_a_whole(lines: list[UsageLine], idle: int) -> None:
    device = UsageLine(
        kind="device",
        minute="2026-11-24T17:05",
        unit="inference",
        device="gpu0",
        device_class="h100",
        busy_ns=5,
        wall_ns=5 + idle,
    )
    used = sum(each.device_ns for each in lines)
    for how in ("spread", "show"):
        groups = group([*lines, device], ["tenant"], idle=how)
        assert sum(each.sums["device_ns"] for each in groups) == used + idle
    assert any(each.keys["tenant"] == IDLE for each in groups)


def test_the_use_of_each_tier_has_its_own_price() -> None:
    lines = [line(ns=3600 * 10**9, tier=tier) for tier in ("gold", "gold", "bronze")]
    prices = [GPU, replace(GPU, tier="gold", device_hour=5_000_000_000)]
    groups = group(lines, ["tenant"], by_tier=True)
    assert [(each.tier, each.priced(prices)[1].total) for each in groups] == [  # type: ignore[index]
        ("bronze", 4_000_000_000), ("gold", 10_000_000_000)
    ]  # fmt: skip
    assert len(group(lines, ["tenant"])) == 1, "without such prices the output is one line"


def test_tokens_have_the_price_without_a_class_whatever_device_made_them() -> None:
    """Servers of language models record them with the time of their device."""
    groups = group([line(ns=3600 * 10**9, tokens_out=10**6)], ["tenant", "class"])
    assert [each.keys["class"] for each in groups] == ["", "h100"]
    assert [each.priced([GPU, BASE])[1].total for each in groups] == [2 * 10**9, 4 * 10**9]  # type: ignore[index]


def test_a_group_in_which_nothing_was_used_is_left_out() -> None:
    """Such as a server's own count of requests, where the gateway counts those of the tenant."""
    lines = [line(requests=3), line(unit="gateway", target="n", requests=3)]
    assert [each.keys["target"] for each in group(lines, ["target"])] == ["n"]


def test_repeated_lines_are_dropped_and_gaps_are_named() -> None:
    found = [("a-00000001", 1, line(ns=1)), ("a-00000001", 1, line(ns=1)), ("a-00000003", 1, line(ns=1))]
    usage = collect(iter([*found, ("a-00000003", 2, line(kind="crash"))]), "2026-11-24T00:00", "2026-11-25T00:00")
    assert (len(usage.lines), usage.repeats, usage.gaps, usage.crashes) == (3, 1, ["a-00000002"], 1)
    crashed = [("b-00000001", 1, line(kind="crash", wall_ns=9 * 10**9))]
    assert collect(iter([*found, *crashed]), "2026-11-24T00:00", "2026-11-25T00:00").lost_ns == 9 * 10**9
    assert usage.lost_ns == 10**9  # of a crash that an earlier version has noted
    outside = collect(iter(found), "2026-11-25T00:00", "2026-11-26T00:00")
    assert outside.lines == []


def test_times_are_utc() -> None:
    assert moment("2026-11-24") == "2026-11-24T00:00"
    assert moment("2026-11-24T17:05+02:00") == "2026-11-24T15:05"
    with pytest.raises(CommandFailed, match="no time"):
        moment("yesterday")


# --- prices --------------------------------------------------------------------------------------------------------


def test_amounts_are_exact_and_rounded_once() -> None:
    assert amounts(GPU, device_ns=3600 * 10**9).device == 4_000_000_000
    assert amounts(GPU, device_ns=900).device == 1  # 900 ns cost 10^-9 EUR
    assert amounts(GPU, device_ns=449).device == 0
    paid = amounts(BASE, cpu_ns=3600 * 10**9, bytes_out=1 << 30, tokens_out=500_000)
    assert (paid.cpu, paid.bytes_out, paid.tokens_out) == (36_000_000, 90_000_000, 1_000_000_000)
    assert paid.total == 1_126_000_000
    assert decimal_text(paid.total) == "1.126000000" and decimal_text(-1) == "-0.000000001"


def test_the_price_of_a_day_is_the_last_one_that_is_valid_then() -> None:
    later = Price(name="l", device_class="h100", currency="EUR", valid_from="2026-11-01", device_hour=1)
    assert price_at([later, GPU], "h100", "2026-10-31") is GPU
    assert price_at([later, GPU], "h100", "2026-11-01") is later
    assert price_at([later, GPU], "h100", "2025-12-31") is None
    assert price_at([GPU, BASE], "", "2026-11-01") is BASE
    assert price_at([GPU], "a100", "2026-11-01") is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[prices.a]\ncurrency = 'eur'\nvalid_from = 2026-01-01", "currency"),
        ("[prices.a]\ncurrency = 'EUR'\nvalid_from = 2026-01-01\ndevice_hour = -1", "device_hour"),
        ("[prices.a]\ncurrency = 'EUR'\nvalid_from = 2026-01-01\ndevice_hour = '0.0000000001'", "nine decimals"),
        ("[prices.a]\ncurrency = 'EUR'\nvalid_from = 2026-01-01\nclass = 'H 100'", "class"),
        ("[prices.a]\ncurrency = 'EUR'\nvalid_from = 2026-01-01\ngib_out = 'x'", "gib_out"),
        ("[prices.a]\ncurrency = 'EUR'\nvalid_from = 2026-01-01\nrebate = 1", "rebate"),
        ("", "has no"),
    ],
)
def test_bad_prices_are_refused_with_their_place(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(text)
    with pytest.raises(CommandFailed, match=reason):
        read_prices(file)


# --- the command -----------------------------------------------------------------------------------------------


def test_a_batch_over_the_full_hour_is_no_difference() -> None:
    found = hours(
        [
            ("a-00000001-1", device("2026-11-24T17:59", 900, 1000, 900)),
            ("a-00000002-1", line(ns=1500, minute="2026-11-24T18:00")),
            ("a-00000002-2", device("2026-11-24T18:00", 600, 1000, 0)),
        ]
    )
    assert [hour.difference_ns for hour in found.values()] == [0, 0]


def test_export_and_reconcile_over_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = UsageFiles(tmp_path, "a1")
    files.append(
        "2026-11-24T17:05", [line(ns=600 * 10**9, requests=2), device("2026-11-24T17:05", 600 * 10**9, 10**12)]
    )
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    period = ["--from", "2026-11-24", "--to", "2026-11-25", "--state", str(tmp_path)]
    assert main(["usage", "export", *period, "--format", "ndjson", "--prices", str(prices)]) == 0
    assert capsys.readouterr().out == ""  # the minute is not over
    assert main(["usage", "export", *period, "--format", "ndjson", "--prices", str(prices), "--open"]) == 0
    open_ = json.loads(capsys.readouterr().out)
    files.seal()
    assert main(["usage", "export", *period, "--format", "ndjson", "--prices", str(prices)]) == 0
    sealed = json.loads(capsys.readouterr().out)
    assert sealed == open_ and (sealed["tenant"], sealed["amount"]) == ("acme", "0.666666667")
    assert main(["usage", "reconcile", *period]) == 0
    assert "good" in capsys.readouterr().out
    files.append("2026-11-24T18:00", [device("2026-11-24T18:00", 600 * 10**9, 10**12)])  # and nobody was charged
    files.seal()
    assert main(["usage", "reconcile", *period, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(row["hour"][-2:], row["good"]) for row in found["hours"]] == [("17", True), ("18", False)]
    assert main(["usage", "export", "--state", str(tmp_path / "none")]) == 1
    assert "no usage is recorded" in capsys.readouterr().err


@pytest.mark.parametrize("unit", ["gateway", "logic", "inference"])
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("ftp://bucket", "'ftp' is not a known object store: use s3://bucket/prefix"),
        ("bucket/prefix", "is not a known object store"),
        ("s3://key:hunter2@bucket", "takes no credentials"),
        ("az://account", "container"),
    ],
)
def test_a_bad_address_of_the_store_is_refused_in_one_line(
    unit: str, address: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([unit, "--usage-store", address])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    assert "--usage-store" in said.err and reason in said.err and "hunter2" not in said.err


SEEN = {"kind": "seen", "unit": "gateway", "device": "", "device_class": ""}
GUESS = {"unit": "gateway", "device": "", "device_class": "", "estimated": True}


@pytest.mark.parametrize(
    ("lines", "twice"),
    [
        # a stream of a service, which the model's server and the logic server have recorded
        ([line(**GUESS, target="chat", ns=50), line(unit="logic", requests=2), line(ns=7)], [("acme", "", 50)]),
        ([line(**SEEN, target="chat", requests=2), line(unit="logic", requests=2), line(ns=7)], []),
        ([line(**GUESS, target="m", ns=50), line(requests=2, ns=7)], [("acme", "m", 50)]),
        # a part of the calls of one model go to servers that keep no ledger
        ([line(**GUESS, target="m", ns=50), line(**SEEN, requests=2), line(requests=2, ns=7)], []),
        ([line(**GUESS, target="m", ns=50), line(**SEEN, requests=2), line(requests=3, ns=7)], [("acme", "m", 50)]),
        ([line(**GUESS, target="theirs", ns=50), line(**SEEN, requests=2), line(requests=2, ns=7)], []),
        # 100 of 10,000 calls are those whose answers were lost with a gateway
        ([line(**GUESS, target="m", ns=5), line(**SEEN, requests=9_901), line(requests=10_000, ns=7)], []),
        # other tenants, and what nobody is charged for, are no second record
        ([line(**GUESS, target="m", ns=50), line("other", requests=2), line(requests=2, why="shadow")], []),
        ([line(**SEEN | {"why": "left", "estimated": True}, requests=2), line(requests=2)], []),
    ],
)
def test_an_estimate_beside_what_a_server_recorded_is_a_second_bill(
    lines: list[UsageLine], twice: list[tuple[str, str, int]]
) -> None:
    """Streams were billed twice, and the check said that all was good."""
    assert billed_twice(lines) == twice


def test_reconcile_says_what_is_billed_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = UsageFiles(tmp_path, "a1")
    used = [line(ns=600, requests=2), device("2026-11-24T17:05", 600, 10**12)]
    files.append("2026-11-24T17:05", [*used, line(**GUESS, target="m", ns=5 * 10**9)])
    files.seal()
    period = ["--from", "2026-11-24", "--to", "2026-11-25", "--state", str(tmp_path)]
    assert main(["usage", "reconcile", *period]) == 1
    assert "billed twice: 5.000 s of model m were estimated for tenant acme" in capsys.readouterr().out
    assert main(["usage", "reconcile", *period, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["good"] and all(row["good"] for row in found["hours"])
    assert found["billed_twice"] == [{"tenant": "acme", "target": "m", "estimated_ns": 5 * 10**9}]


@pytest.mark.parametrize("action", ["export", "reconcile"])
@pytest.mark.parametrize("end", ["2026-11-01", "2026-11-30"])
def test_a_period_has_to_end_after_it_begins(action: str, end: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", action, "--from", "2026-11-30", "--to", end]) == 1
    assert f"--from 2026-11-30T00:00 has to be before --to {end}T00:00" in capsys.readouterr().err


@pytest.mark.parametrize(("off_ns", "good"), [(1010, True), (1011, False), (-1000, True), (-1001, False)])
def test_a_difference_is_judged_by_the_time_that_a_device_was_busy(off_ns: int, good: bool) -> None:
    """Of 10 s with 100 us of work a surplus or a lack of 1 % is 1 us."""
    hour = DeviceHour(tenants_ns=60_000 + off_ns, unbilled_ns=40_000, busy_ns=100_000, wall_ns=10**10)
    assert (hour.difference_ns, hour.good) == (off_ns, good)
    assert DeviceHour(wall_ns=10**10).good and DeviceHour(wall_ns=10**10).ratio == 0.0
