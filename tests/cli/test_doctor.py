"""`oriel doctor`: what each check finds, what it says to do, and what it never prints."""

import asyncio
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from redis_server import PASSWORD, redis_server

from oriel_cli.doctor import command, machine, services
from oriel_cli.doctor.findings import Finding
from oriel_cli.main import main
from oriel_policies.documents import Snapshot

from .certificate_pair import pair

NOW = datetime.now(UTC)
TIERS = "[tiers.gold]\nband = 0\ntarget_ms = 500\n"
UNIT = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    client, _ = listener.accept()
    client.recv(4096)
    body = sys.argv[3].encode()
    client.sendall(b"HTTP/1.1 %s OK\\r\\ncontent-length: %d\\r\\n\\r\\n%s" % (sys.argv[4].encode(), len(body), body))
    client.close()
"""


def of(found: list[Finding], status: str) -> list[str]:
    return [each.what for each in found if each.status == status]


@pytest.mark.parametrize(
    ("begins", "ends", "status", "said"),
    [
        (-10, 90, "ok", "CN=api is valid until"),
        (-10, 5, "warn", "CN=api expires on"),
        (-10, -1, "fail", "CN=api expired on"),
        (1, 90, "fail", "CN=api is not valid yet"),
    ],
)
def test_a_certificate_is_judged_by_its_days(tmp_path: Path, begins: int, ends: int, status: str, said: str) -> None:
    chain, key = pair(tmp_path, begins=timedelta(days=begins), ends=timedelta(days=ends))
    (found,) = machine.certificates(chain, key)
    assert found.status == status and said in found.what and (status == "ok" or found.fix)


def test_a_pair_that_does_not_go_together_is_a_fault(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    chain, _ = pair(tmp_path / "one", begins=timedelta(days=-1), ends=timedelta(days=90))
    _, key = pair(tmp_path / "two", begins=timedelta(days=-1), ends=timedelta(days=90))
    assert "the key is not the certificate's" in of(list(machine.certificates(chain, key)), "fail")[0]
    assert of(list(machine.certificates(chain, tmp_path / "absent")), "fail")
    assert of(list(machine.certificates(chain, None)), "fail") and not list(machine.certificates(None, None))


async def test_a_port_is_free_or_held_by_somebody_who_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mine:
        port = mine.getsockname()[1]
        (found,) = await machine.ports(default={"gateway": {"http": port}})
        assert found.status == "fail" and f"(process {os.getpid()})" in found.what
        assert "--gateway-http-port" in found.fix
    (found,) = await machine.ports(default={"gateway": {"http": port}})
    assert found == Finding(check=f"port {port}", status="ok", what="free (gateway http)")


@pytest.mark.parametrize(
    ("body", "status", "expected", "said"),
    [
        ("{}", "200", "ok", "held by oriel gateway (process {pid}), ready"),
        (
            '{"ready": false, "reason": "no endpoint"}',
            "503",
            "fail",
            "oriel gateway (process {pid}) is not ready: no endpoint",
        ),
    ],
)
async def test_a_port_of_ours_is_asked_whether_its_unit_is_ready(
    body: str, status: str, expected: str, said: str
) -> None:
    words = [sys.executable, "-c", UNIT, "oriel_cli.main", "gateway", body, status]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as unit:
        try:
            assert unit.stdout is not None
            port = int(unit.stdout.readline())
            (found,) = await machine.ports(default={"gateway": {"admin": port}})
            assert (found.status, found.what) == (expected, said.format(pid=unit.pid))
        finally:
            unit.kill()


def test_clocks_that_differ_are_a_fault() -> None:
    (found,) = machine.clock({"redis": 45.0, "logic": 0.2}, 30.0)
    assert found.status == "fail" and "redis is +45 s" in found.what and "logic" not in found.what
    (found,) = machine.clock({"redis": 0.1}, 30.0)
    assert found.status in ("ok", "warn")


def snapshot(text: str) -> Snapshot:
    found, made = services.documents({"a.toml": (TIERS + text).encode()}, "here")
    assert made is not None, found
    return made


def key_line(key: str, expires: timedelta | None = None) -> str:
    until = f", expires = {(NOW + expires).isoformat(timespec='seconds')}" if expires is not None else ""
    return f'{{ sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"{until} }}'


def test_every_mistake_of_the_documents_is_a_fault_with_its_place() -> None:
    found, made = services.documents({"a.toml": b'[tenants.t]\ntier = "no"\n[[routes]]\nmodel = "m"\n'}, "here")
    assert made is None and len(found) == 2 and "a.toml: tenants.t.tier: no tier is named 'no'" in of(found, "fail")


def test_documents_that_let_nobody_in_or_nothing_out_are_named() -> None:
    found, _ = services.documents({"a.toml": TIERS.encode()}, "here")
    assert of(found, "warn") == ["nobody may call: there is no tenant", "nothing can be reached: there is no route"]


def test_keys_are_judged_and_never_printed() -> None:
    made = snapshot(
        '[tenants.old]\ntier = "gold"\nkeys = [' + key_line("gone", timedelta(days=-1)) + "]\n"
        '[tenants.soon]\ntier = "gold"\nkeys = [' + key_line("near", timedelta(days=3)) + "]\n"
        '[tenants.demo]\ntier = "gold"\nkeys = [' + key_line("oriel-demo-gold") + "]\n"
        '[tenants.bare]\ntier = "gold"\n'
    )
    found = list(services.keys(made, "near"))
    assert of(found, "warn") == [
        "1 keys have expired: old",
        "1 keys expire within 30 days: soon",
        "the demo's published keys are accepted",
        "1 tenants have no key: bare",
    ]
    assert of(found, "ok") == ["the key in ORIEL_KEY is of soon, tier gold"]
    assert of(list(services.keys(made, "gone")), "fail") == ["the key in ORIEL_KEY has expired"]
    assert of(list(services.keys(made, "secret-of-nobody")), "fail") == ["the key in ORIEL_KEY belongs to no tenant"]
    assert "secret-of-nobody" not in str(list(services.keys(made, "secret-of-nobody")))


@asynccontextmanager
async def answering(status: str, date: datetime) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\ndate: {format_datetime(date, usegmt=True)}\r\n".encode())
        writer.write(b"content-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_endpoints_are_asked_and_their_clocks_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        closed = unused.getsockname()[1]
    now = datetime.now(UTC)
    async with answering("200 OK", now) as good, answering("503 Busy", now + timedelta(minutes=5)) as busy:
        made = snapshot(
            f'[pools.p]\nendpoints = ["127.0.0.1:{good}", "127.0.0.1:{busy}", "127.0.0.1:{closed}"]\n'
            f'grpc_endpoints = ["127.0.0.1:{good}", "127.0.0.1:{closed}"]\n'
            '[pools.q]\ndiscover = "dns:no-such-name.invalid:80"\n'
            '[pools.r]\ndiscover = "kubernetes:inference:80"\n'
            '[[routes]]\nmodel = "*"\npool = "p"\n[[routes]]\nservice = "*"\npool = "q"\n'
        )
        found, ahead = await services.endpoints(made)
    assert f"pool p: 127.0.0.1:{good} is ready" in of(found, "ok")
    assert f"pool p: 127.0.0.1:{good} takes connections (gRPC)" in of(found, "ok")
    faults = "\n".join(of(found, "fail"))
    assert f"127.0.0.1:{busy} answers /v2/health/ready with 503: it is not ready" in faults
    assert (
        f"127.0.0.1:{closed} does not answer" in faults and f"127.0.0.1:{closed} takes no connection (gRPC)" in faults
    )
    assert "pool q: the name no-such-name.invalid has no address" in faults and all(
        each.fix for each in found if each.status != "ok"
    )
    assert "pool r: the pods of service inference are not known: KUBERNETES_SERVICE_HOST is not set" in faults
    assert ahead[f"p 127.0.0.1:{busy}"] > 200 > 60 > abs(ahead[f"p 127.0.0.1:{good}"])


async def test_a_redis_that_is_not_there_is_a_fault_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis")
    monkeypatch.setenv("ORIEL_LIMITER_PASSWORD", "hidden-word")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    found, ahead = await services.redis(f"redis://127.0.0.1:{port}/0", None)
    assert of(found, "fail") == [f"127.0.0.1:{port}: ConnectionError"] and not ahead and "hidden-word" not in str(found)
    assert await services.redis("embedded", None) == ([], {})


async def test_a_redis_that_answers_is_good_and_has_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis")
    async with redis_server() as server:
        monkeypatch.delenv("ORIEL_LIMITER_PASSWORD", raising=False)
        refused, _ = await services.redis(server.url, None)
        assert of(refused, "fail") and "ORIEL_LIMITER_PASSWORD" in refused[0].fix
        monkeypatch.setenv("ORIEL_LIMITER_PASSWORD", PASSWORD)
        found, ahead = await services.redis(server.url, None)
    assert len(of(found, "ok")) == 1 and "answers, Redis " in found[0].what and abs(ahead["redis"]) < 30


async def test_a_repository_is_listed_and_its_configurations_are_read(tmp_path: Path) -> None:
    assert of(await services.repository(tmp_path / "absent"), "fail")
    assert of(await services.repository(tmp_path), "warn")
    for name, text in (("good", "max_batch_size: 4"), ("bad", "max_batch_sise: 4")):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.onnx").write_bytes(b"x")
        (tmp_path / name / "config.pbtxt").write_text(text)
    found = await services.repository(tmp_path)
    assert len(found) == 1 and "bad/config.pbtxt" in found[0].what and "did you mean 'max_batch_size'?" in found[0].what


async def test_an_engine_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)  # their imports fail
    monkeypatch.setitem(sys.modules, "treelite", None)
    for name, file in (
        ("net", "model.xml"),
        ("trees", "model.txt"),
        ("weights", "model.safetensors"),
        ("py", "model.py"),
    ):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / file).touch()
    found = [(each.status, each.what, each.fix) for each in await services.repository(tmp_path)]
    missing = "which is not installed"
    assert found[:2] == [
        (
            "warn",
            f"net: OpenVINO models need the package openvino, {missing}",
            "pip install 'oriel-serving[openvino-models]'",
        ),
        ("warn", f"trees: forests need the package treelite, {missing}", "pip install 'oriel-serving[forests]'"),
    ]
    assert len(found) == 3 and found[2][1].startswith("weights: files of weights")


def test_services_are_read_and_not_imported(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "handler.py").write_text("raise SystemExit(3)\n")
    assert of(list(services.services(tmp_path)), "ok") == [f"1 handlers in {tmp_path}"]
    (tmp_path / "one" / "pyproject.toml").write_text("[tool.oriel]\nwrkers = 2\n")
    assert "one/handler.py" in of(list(services.services(tmp_path)), "fail")[0]
    assert of(list(services.services(tmp_path / "absent")), "fail")


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Examine no port of this machine, and keep the state in a folder of the test."""

    async def none() -> list[Finding]:
        return []

    monkeypatch.setattr(command.machine, "ports", none)
    monkeypatch.setenv("ORIEL_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("ORIEL_KEY", raising=False)


@pytest.mark.usefixtures("quiet")
def test_the_exit_code_and_the_table_say_whether_something_has_to_be_done(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor"]) == 0
    assert "fail" not in capsys.readouterr().out
    (tmp_path / "a.toml").write_text('[tenants.t]\ntier = "no"\n')
    assert main(["doctor", "--policies", str(tmp_path), *("--services", str(tmp_path)) * 2]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("fail  policies"))
    assert "a.toml: tenants.t.tier: no tier is named 'no'" in lines[at] and "-> correct the document" in lines[at + 1]
    assert lines[-1].startswith("2 to fix"), "the same finding twice is one"


@pytest.mark.usefixtures("quiet")
def test_for_machines_it_is_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--json", "--policies", str(tmp_path / "absent")]) == 1
    told = json.loads(capsys.readouterr().out)
    (failed,) = [each for each in told["findings"] if each["status"] == "fail"]
    assert told["healthy"] is False and failed["check"] == "policies" and failed["fix"]
    assert all(set(each) == {"check", "status", "what", "fix"} for each in told["findings"])
