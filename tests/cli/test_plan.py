import argparse
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oriel_cli.up import plan, report
from oriel_cli.up.demo_assets import DemoAssets
from oriel_cli.up.units import UnitSpec
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
        "--strict-readiness false --model-control-mode poll --repository-poll-secs 5 "
        "--http-port 8000 --grpc-port 8001 --metrics-port 8002"
    )
    assert inference.prepare and inference.prepare[-1] == str(assets.generated)


def test_the_public_ports_speak_tls_with_a_certificate_and_its_key(assets: DemoAssets) -> None:
    gateway, *others = plan.units(parsed("--tls-cert", "tls.crt", "--tls-key", "tls.key"), assets)
    assert "--tls-cert tls.crt --tls-key tls.key" in flags(gateway) and gateway.scheme == "https"
    assert all(unit.scheme == "http" and "tls" not in flags(unit) for unit in others)
    with pytest.raises(StartFailed, match="goes with its key"):
        plan.units(parsed("--tls-cert", "tls.crt"), assets)


def test_where_usage_is_recorded_is_passed_on_to_each_unit(assets: DemoAssets) -> None:
    assert all("--usage none " in flags(unit) for unit in plan.units(parsed("--usage", "none"), assets))


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


SCALED = b"""
[tiers.t]
band = 0
target_ms = 100

[pools.inference]
discover = "dns:inference:8000"
grpc_discover = "dns:inference:8001"
[pools.inference.scaling]
minimum = 1
maximum = 1000

[pools.logic]
discover = "dns:logic:8090"
[pools.logic.scaling]
minimum = 0
maximum = 1
"""


def test_scaled_units_have_ports_for_as_many_processes_as_their_pools_allow(assets: DemoAssets) -> None:
    (assets.policies / "all.toml").write_bytes(SCALED)
    gateway, logic, *inferences = plan.units(parsed("--scale-to-zero"), assets)
    assert len(inferences) == plan.MOST_PROCESSES
    ports = {str(address) for spec in inferences for address in spec.addresses.values()}
    assert len(ports) == 3 * plan.MOST_PROCESSES
    assert [(spec.name, spec.pool, spec.minimum) for spec in inferences[:2]] == [
        ("inference", "inference", 1),
        ("inference-2", "inference", 1),
    ]
    for spec in inferences:
        assert f"--endpoint inference={spec.addresses['http']} " in flags(gateway)
        assert f"--inference {spec.addresses['http']} " in flags(logic) and logic.needs == "inference"
    assert f"--scaler-port {gateway.addresses['scaler'].port}" in flags(gateway)
    assert logic.spare[3:] == ["oriel_cli.up.spare", *logic.argv[4:]] and not gateway.pool


def test_servers_behind_the_gateway_do_not_wait_for_probes_when_they_stop(assets: DemoAssets) -> None:
    gateway, *others = plan.units(parsed("--free-ports"), assets)
    assert not gateway.environ and [each.environ for each in others] == [{"ORIEL_LAME_DUCK_S": "0"}] * 2


@pytest.mark.parametrize("flag", ["--scale-to-zero", "--free-ports"])
def test_logic_calls_models_through_the_internal_port_if_asked(
    flag: str, assets: DemoAssets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ORIEL_TICKET_KEYS", raising=False)
    (assets.policies / "all.toml").write_bytes(SCALED)
    words = ("--models-through-gateway", flag, "--tls-cert", "tls.crt", "--tls-key", "tls.key")
    (gateway, logic, *_), (other, *_) = plan.units(parsed(*words), assets), plan.units(parsed(*words), assets)
    internal = gateway.addresses["internal"]
    assert internal.host == "127.0.0.1" and (internal.port == 8084 or flag == "--free-ports")
    assert f"--internal-port {internal.port}" in flags(gateway) and f"--gateway {internal} " in flags(logic)
    assert "--inference" not in flags(logic) and not logic.needs and not logic.environ
    keys = [spec.environ["ORIEL_TICKET_KEYS"] for spec in (gateway, other)]
    assert min(map(len, keys)) >= 32 and keys[0] != keys[1] and keys[0] not in flags(gateway)


def test_pools_without_bounds_and_other_hosts_are_not_scaled(assets: DemoAssets) -> None:
    (assets.policies / "all.toml").write_bytes(SCALED.replace(b"[pools.logic.scaling]\nminimum = 0\nmaximum = 1", b""))
    with pytest.raises(StartFailed, match=r"needs \[pools.logic.scaling\]"):
        plan.units(parsed("--scale-to-zero"), assets)
    with pytest.raises(StartFailed, match="leave --host out"):
        plan.units(parsed("--scale-to-zero", "--host", "0.0.0.0"), assets)
    (assets.policies / "all.toml").write_text("[pools.p]")
    with pytest.raises(StartFailed, match="not usable"):
        plan.units(parsed("--scale-to-zero"), assets)


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
    assert "http://127.0.0.1:8080/docs" in shown and "http://127.0.0.1:8080/v1/services/digits" in shown
    secure = plan.units(parsed("--tls-cert", "tls.crt", "--tls-key", "tls.key"), assets)
    units = [SimpleNamespace(spec=spec, name=spec.name, state="ready", pid=1) for spec in secure]
    assert "https://127.0.0.1:8080/docs" in report.as_text(units, [], None, traces="", took_s=1.0)


@pytest.mark.parametrize(
    ("words", "tried"),
    [
        ("", {"/v1/services/digits", "/v2/models/digits/infer"}),
        ("--services OWN", {"/v1/services", "/v2/models/digits/infer"}),
        ("--model-repository OWN", {"/v1/services"}),
        ("--services services --services OWN", {"/v1/services/digits", "/v2/models/digits/infer"}),
        ("--policies OWN", set()),  # it has no demo keys
    ],
)
def test_commands_are_shown_for_what_is_served(words: str, tried: set[str], assets: DemoAssets, tmp_path: Path) -> None:
    (tmp_path / "OWN").mkdir()
    args = parsed(*[str(tmp_path / word) if word[0] != "-" else word for word in words.split()])
    units: Any = [SimpleNamespace(spec=spec, name=spec.name, state="ready", pid=1) for spec in plan.units(args, assets)]
    shown = report.as_text(units, [], assets, traces="", took_s=1.0)
    commands = shown[shown.index("try, in") :]
    assert set(re.findall(r"8080(/\S+)", commands)) == tried and "trace THE-X" in commands


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
