"""`oriel policies check|schema|explain` as a person or a pipeline sees them."""

import io
import json
from pathlib import Path

import pytest

from oriel_cli.main import main

EXAMPLES = Path(__file__).parents[2] / "policies" / "examples"
KEY = "oriel-demo-silver"


def test_check_names_every_mistake_on_a_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.toml").write_text("[tiers.gold]\nband = 900\ntarget_ms = 1\n[pools.p]\nendpoint = ['a:1']\n")
    (tmp_path / "b.ndjson").write_text('{"name": "t", "tier": "gld"}\n')
    assert main(["policies", "check", str(tmp_path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        ["a.toml", "tiers.gold.band"],
        ["a.toml", "pools.p.endpoint"],
        ["b.ndjson:1", "tenants.t.tier"],
    ]
    assert "did you mean 'endpoints'?" in lines[1]
    assert main(["policies", "check", "--json", str(tmp_path)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["good"] and [bad["file"] for bad in report["mistakes"]] == ["a.toml", "a.toml", "b.ndjson:1"]
    assert main(["policies", "check", "--json", str(EXAMPLES)]) == 0
    assert json.loads(capsys.readouterr().out) == {"good": True, "tenants": 3, "routes": 2, "pools": 2, "mistakes": []}


def test_the_schema_knows_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$ref"] == "#/$defs/DocumentTable" and "$schema" in schema
    tables = schema["$defs"]
    assert tables["TierTable"]["required"] == ["band", "target_ms"]
    assert not any(table.get("additionalProperties", True) for table in tables.values())
    assert {"tiers", "tenants", "issuers", "pools", "prices", "routes", "http"} == tables["DocumentTable"][
        "properties"
    ].keys()


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["policies", "explain", "--policies", str(EXAMPLES), *words])
    out, err = capsys.readouterr()
    assert KEY not in out + err
    return code, out + err


def test_explain_takes_the_key_from_three_places_and_never_prints_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, given = explained(capsys, "--key", KEY, "--model", "digits")
    assert code == 0 and "tenant birch" in given and "silver" in given and "pool inference" in given
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{KEY}\n"))
    assert explained(capsys, "--key", "-", "--model", "digits") == (0, given)
    monkeypatch.setenv("ORIEL_KEY", KEY)
    assert explained(capsys, "--model", "digits") == (0, given)
    monkeypatch.delenv("ORIEL_KEY")
    code, said = explained(capsys, "--model", "digits")
    assert code == 1 and "ORIEL_KEY" in said


def test_explain_says_why_a_call_would_be_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = explained(capsys, "--tenant", "cedar", "--model", "mlp")
    assert code == 1 and "looks absent" in said and "not_found" in said
    code, said = explained(capsys, "--key", KEY, "--service", "digits", "--json", "--header", "X-A: b")
    report = json.loads(said)
    assert code == 0 and report["served"] and report["steps"][-1]["room"] == "pool"
    code, said = explained(capsys, "--key", KEY, "--model", "digits", "--header", "x-request-tier: gold")
    assert code == 1 and "refused: tier_not_allowed" in said
    code, said = explained(capsys, "--key", KEY, "--model", "digits", "--header", "x-request-tier: bronze")
    assert code == 0 and "decided by tenants.toml: tenants.birch.tier\n" in said
    assert "tier      bronze: band 2" in said and "decided by the request's x-request-tier\n" in said
    assert explained(capsys, "--tenant", "nobody", "--model", "mlp") == (1, "oriel: no tenant is named 'nobody'\n")
