"""`oriel slo`: a table that fits a terminal, from what the gateway's admin port answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from oriel_cli import probe
from oriel_cli.errors import CommandFailed
from oriel_cli.main import main
from oriel_cli.watch import slo

WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d", "30d")


def figures(calls: int, bad: int, objective: float, causes: dict[str, int]) -> dict[str, Any]:
    share = 1 - bad / calls if calls else None
    burn = bad / calls / (1 - objective) if calls else None
    return {
        "calls": dict.fromkeys(WINDOWS, calls),
        "bad": dict.fromkeys(WINDOWS, bad),
        "attainment": dict.fromkeys(WINDOWS, share),
        "burn": dict.fromkeys(WINDOWS, burn),
        "budget_left": 1 - (burn or 0.0),
        "causes": causes,
    }


def report(**more: Any) -> dict[str, Any]:
    tiers = [("gold", 500.0, 0.99, 10_000, 144), ("silver-of-the-longest-name", 10_000.0, 0.5, 0, 0)]
    return {
        "at": 1.0,
        "windows": {},
        "kept": True,
        "tiers": [
            {
                "tier": tier,
                "target_ms": target,
                "objective": objective,
                **figures(calls, bad, objective, {"queue": bad}),
            }
            for tier, target, objective, calls, bad in tiers
        ],
        "targets": [
            {"tenant": "acme" * 9, "tier": "gold", "target": "model:" + "long" * 20, **figures(10**7, 10**6, 0.99, {})},
            {"tenant": "other", "tier": "gold", "target": "other", **figures(3, 3, 0.99, {"upstream_error": 3})},
        ],
        "more": 7,
    } | more


def test_the_table_fits_a_terminal_and_says_what_matters() -> None:
    lines = slo.table(report())
    assert max(map(len, lines)) <= 80
    (gold,) = [line for line in lines if line.startswith("gold")]
    assert gold.split() == "gold 500 ms 99 % 98.56 % 98.56 % 98.56 % 1.4 spent".split()
    assert "  gold, last hour: lost to queue 144" in lines
    assert any(line.startswith("silver-o..") and line.split()[-1] == "%" for line in lines)
    assert lines[-1] == "and 7 more (--json)"
    assert any("upstream_error" in line for line in lines)


def test_one_tenant_is_shown_by_target_alone() -> None:
    lines = slo.table(report(more=0, kept=False), tenant="acme")
    assert lines[0].startswith("tenant") and "memory" in lines[-1]
    assert slo.table(report(targets=[], more=0), tenant="nobody") == [
        "no call of tenant 'nobody' has been counted in the last 30 days"
    ]


def test_the_gateways_whose_calls_these_are_are_named() -> None:
    assert slo.table(report(gateways=3))[-1] == "(the calls of all gateways, 3 at present)"
    assert slo.table(report(gateways=1)) == slo.table(report())


def test_nothing_is_rounded_up_to_all() -> None:
    assert [slo._share(share) for share in (1.0, 0.99999, 0.9985, 0.0, -1.0, None)] == [
        "100 %", "99.99 %", "99.85 %", "0.00 %", "-100.00 %", "-",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, "no gateway answers"),
        (probe.Answer(401, None), "ORIEL_ADMIN_TOKEN"),
        (probe.Answer(404, None), "not the admin port"),
    ],
)
def test_what_does_not_answer_is_told(
    answer: probe.Answer | None, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def get(*_: Any, **__: Any) -> probe.Answer | None:
        return answer

    monkeypatch.setattr(probe, "get", get)
    assert main(["slo", "--admin", "http://127.0.0.1:1"]) != 0
    assert text in capsys.readouterr().err


def test_without_an_instance_the_usual_port_is_asked_and_the_option_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    async def get(host: str, port: int, *_: Any, **__: Any) -> None:
        asked.append(port)

    monkeypatch.setattr(probe, "get", get)
    monkeypatch.setenv("ORIEL_STATE", str(tmp_path))
    assert main(["slo"]) == main(["slo", "--admin-port", "9"]) == 1 and asked == [8082, 9]
    assert "no gateway answers on the admin port 127.0.0.1:8082: pass --admin http" in capsys.readouterr().err


async def test_the_token_is_sent_and_the_report_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    async def get(host: str, port: int, path: str, **more: Any) -> probe.Answer:
        asked.update(more, path=path, at=(host, port))
        return probe.Answer(200, report())

    monkeypatch.setattr(probe, "get", get)
    monkeypatch.setenv("ORIEL_ADMIN_TOKEN", "an-operators-token")
    found = await slo.fetch("h", 1, "a&b", 20)
    assert json.dumps(found) and asked["path"] == "/slo?limit=20&tenant=a%26b"
    assert asked["headers"] == (("authorization", "Bearer an-operators-token"),)
    with pytest.raises(CommandFailed, match="not http"):
        slo.address("https://x")
