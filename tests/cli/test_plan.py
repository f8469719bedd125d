import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oriel_cli import plan, report
from oriel_cli.demo_assets import DemoAssets
from oriel_cli.units import UnitSpec
from oriel_wire.errors import StartFailed


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture
def assets(tmp_path: Path) -> DemoAssets:
    for name in ("policies", "services", "models", "digits"):
        (tmp_path / name).mkdir()
    return DemoAssets(
        policies=tmp_path / "policies",
        services=(tmp_path / "services",),
        models=tmp_path / "models",
        digits=tmp_path / "digits",
        generators=(tmp_path / "write.py",),
        generated=tmp_path / "generated",
    )


def flags(spec: UnitSpec) -> str:
    return " ".join(spec.argv[spec.argv.index("oriel_cli.main") + 1 :])


def test_the_demo_on_its_usual_ports(assets: DemoAssets, tmp_path: Path) -> None:
    gateway, logic, inference = plan.units(parsed(), assets)
    assert flags(gateway) == (
        f"gateway --policies {tmp_path}/policies --host 127.0.0.1 --http-port 8080 --grpc-port 8081 --admin-port 8082 "
        "--endpoint logic=127.0.0.1:8090 --endpoint inference=127.0.0.1:8000 --grpc-endpoint inference=127.0.0.1:8001"
    )
    assert flags(logic) == (
        f"logic --services {tmp_path}/services --inference 127.0.0.1:8000 --inference-grpc 127.0.0.1:8001 "
        "--host 127.0.0.1 --workers 2 --http-port 8090 --admin-port 8092"
    )
    assert flags(inference) == (
        f"inference --model-repository {tmp_path}/models --model-repository {tmp_path}/generated --host 127.0.0.1 "
        "--strict-readiness false --http-port 8000 --grpc-port 8001 --metrics-port 8002"
    )
    assert inference.prepare and inference.prepare[-1] == str(assets.generated)


def test_the_public_ports_speak_tls_with_a_certificate_and_its_key(assets: DemoAssets) -> None:
    gateway, *others = plan.units(parsed("--tls-cert", "tls.crt", "--tls-key", "tls.key"), assets)
    assert "--tls-cert tls.crt --tls-key tls.key" in flags(gateway) and gateway.scheme == "https"
    assert all(unit.scheme == "http" and "tls" not in flags(unit) for unit in others)
    with pytest.raises(StartFailed, match="goes with its key"):
        plan.units(parsed("--tls-cert", "tls.crt"), assets)


def test_models_that_are_there_are_not_generated_again(assets: DemoAssets) -> None:
    assets.generated.mkdir()
    assert plan.units(parsed(), assets)[2].prepare == ()


def test_free_ports_are_all_different_and_passed_on(assets: DemoAssets) -> None:
    specs = plan.units(parsed("--free-ports"), assets)
    addresses = [address for spec in specs for address in spec.addresses.values()]
    assert len({address.port for address in addresses}) == 8
    assert f"--endpoint inference={specs[2].addresses['http']}" in flags(specs[0])


def test_folders_of_ones_own_replace_the_demos(assets: DemoAssets, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    words = ("--model-repository", f"{tmp_path}/mine", "--services", f"{tmp_path}/mine", "--workers", "5")
    _, logic, inference = plan.units(parsed(*words), assets)
    assert f"--model-repository {tmp_path}/mine --host" in flags(inference) and inference.prepare == ()
    assert f"--services {tmp_path}/mine --inference" in flags(logic) and "--workers 5" in flags(logic)


def test_the_public_host_is_the_gateways_and_only_for_its_public_ports(assets: DemoAssets) -> None:
    gateway, logic, _ = plan.units(parsed("--host", "::1"), assets)
    assert [str(address) for address in gateway.addresses.values()] == ["[::1]:8080", "[::1]:8081", "127.0.0.1:8082"]
    assert "--host ::1" in flags(gateway) and "--host 127.0.0.1" in flags(logic)


def test_without_demo_what_is_missing_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"needs --policies DIR, --model-repository DIR \(or --demo"):
        plan.units(parsed("--services", str(tmp_path)), None)


def test_a_folder_that_is_not_there_is_named(assets: DemoAssets) -> None:
    with pytest.raises(StartFailed, match="no folder '/nowhere'"):
        plan.units(parsed("--services", "/nowhere"), assets)


def test_what_is_printed_when_all_is_up_leads_to_the_page_and_the_clients(assets: DemoAssets) -> None:
    units: Any = [
        SimpleNamespace(spec=spec, name=spec.name, state="ready", pid=1) for spec in plan.units(parsed(), assets)
    ]
    shown = report.as_text(units, [], assets, traces="", took_s=1.0)
    assert "http://127.0.0.1:8080/docs" in shown and "http://127.0.0.1:8080/v1/completions" in shown
    secure = plan.units(parsed("--tls-cert", "tls.crt", "--tls-key", "tls.key"), assets)
    units = [SimpleNamespace(spec=spec, name=spec.name, state="ready", pid=1) for spec in secure]
    assert "https://127.0.0.1:8080/docs" in report.as_text(units, [], None, traces="", took_s=1.0)


@pytest.mark.parametrize("compiled", [False, True])
def test_one_line_says_that_a_checkout_is_not_what_is_deployed(
    compiled: bool, assets: DemoAssets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "is_compiled", lambda: compiled)
    units: Any = [
        SimpleNamespace(spec=spec, name=spec.name, state="ready", pid=1) for spec in plan.units(parsed(), assets)
    ]
    shown = report.as_text(units, [], None, traces="", took_s=1.0).splitlines()
    assert (report.PURE in shown) is not compiled
    assert "pure" not in report.as_json(units, [], None, traces="", took_s=1.0).lower()
