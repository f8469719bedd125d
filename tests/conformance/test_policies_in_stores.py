"""A real gateway whose policies lie in each kind of store: reload, mistakes, an outage, a restart without the store."""

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from oriel_cli.main import main
from oriel_cli.up.units import free_ports

from ..conftest import Run
from ..waiting import wait_until
from .object_stores import ACCOUNT_KEY, SERVERS, ObjectServer, object_server, point_to
from .redis_server import proxy_in_a_thread

POLICIES = """
[tiers.gold]
band = 0
target_ms = 100
[pools.p]
endpoints = ["127.0.0.1:1"]
probe = ""
[[routes]]
model = "*"
pool = "p"
"""


def tenant(*keys: str) -> bytes:
    listed = ", ".join(f'{{ sha256 = "{hashlib.sha256(key.encode()).hexdigest()}" }}' for key in keys)
    return f'[tenants.acme]\ntier = "gold"\nmodels = ["*"]\nkeys = [{listed}]\n'.encode()


@pytest.fixture(params=sorted(SERVERS))
def server(request: pytest.FixtureRequest, run: Run) -> Iterator[ObjectServer]:
    with object_server(request.param, run) as running:
        yield running


class Running:
    """A gateway process, its log in `log`."""

    def __init__(self, url: str, state: Path, environment: Mapping[str, str]) -> None:
        self.http, grpc, self.admin = free_ports("127.0.0.1", 3)
        self.log = state.parent / f"{state.name}.log"
        words = ["gateway", "--policies", url, "--http-port", str(self.http), "--grpc-port", str(grpc)]
        self.command = [sys.executable, "-P", "-m", "oriel_cli.main", *words, "--admin-port", str(self.admin)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, **environment, "ORIEL_STATE": str(state), "PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=log,
                stderr=log,
            )
        self._client = httpx.Client(trust_env=False, timeout=60.0)

    def close(self) -> None:
        self._client.close()

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self._client.get(f"http://127.0.0.1:{self.admin}/health/live").status_code == 200
        except httpx.TransportError:
            return False

    def policies(self) -> Any:
        return self._client.get(f"http://127.0.0.1:{self.admin}/policies").json()

    def metrics(self) -> str:
        return self._client.get(f"http://127.0.0.1:{self.admin}/metrics").text

    def takes(self, key: str) -> bool:
        headers = {"x-api-key": key}
        return self._client.get(f"http://127.0.0.1:{self.http}/v2/models/digits", headers=headers).status_code != 401

    def reload(self, seen: Callable[[], bool]) -> None:
        """Have the gateway read the store now, and wait until `seen` is true."""
        self.process.send_signal(signal.SIGHUP)
        wait_until(seen)


@contextmanager
def gateway(url: str, state: Path, environment: Mapping[str, str]) -> Iterator[Running]:
    running = Running(url, state, environment)
    try:
        wait_until(lambda: running.ready())
        yield running
    finally:
        running.process.terminate()
        running.process.wait(timeout=40)
        running.close()


# Three starts of a gateway for each store. The tests below and test_object_clients.py cover the clients of gs and az.
@pytest.mark.parametrize(
    "server", ["s3", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("gs", "az"))], indirect=True
)
def test_a_gateway_lives_on_policies_in_a_store(server: ObjectServer, tmp_path: Path) -> None:
    with proxy_in_a_thread(server.port) as (port, set_mode):
        live_on_policies(server, server.environment(port), set_mode, tmp_path)


def live_on_policies(
    server: ObjectServer, environment: Mapping[str, str], set_mode: Callable[[str], None], folder: Path
) -> None:
    url = f"{server.url}/live"
    server.put("live/routes.toml", POLICIES.encode())
    server.put("live/tenants.toml", tenant("one"))
    server.put("live/notes/README.md", b"not a document")
    with gateway(url, folder / "state", environment) as running:
        assert running.takes("one") and not running.takes("two")
        assert running.policies()["store"]["url"] == url
        server.put("live/tenants.toml", tenant("two"))
        running.reload(lambda: running.takes("two"))
        assert not running.takes("one")
        # A document with a mistake: the old documents stay in force, and the file and the reason are named.
        server.put("live/routes.toml", POLICIES.replace('pool = "p"', 'pool = "q"').encode())
        running.reload(lambda: running.policies()["mistakes"] != [])
        (mistake,) = running.policies()["mistakes"]
        assert mistake["file"] == "routes.toml" and "'q'" in mistake["reason"] and running.takes("two")
        server.put("live/routes.toml", POLICIES.encode())
        running.reload(lambda: running.policies()["mistakes"] == [])
        assert "oriel_gateway_policy_store_up 1.0" in running.metrics()
        # During an outage of the store only the reported state changes.
        set_mode("refuse")
        running.reload(lambda: running.policies()["store"]["reason"] != "")
        assert running.takes("two") and "oriel_gateway_policy_store_up 0.0" in running.metrics()
        arguments = Path(f"/proc/{running.process.pid}/cmdline")
        told = [running.log.read_text(), running.metrics(), str(running.policies()), arguments.read_text()]
    # A gateway that starts now begins with the last set of documents; one without such a set names the reason and ends.
    with gateway(url, folder / "state", environment) as again:
        assert again.takes("two") and not again.takes("one")
        told.append(again.log.read_text())
    other = Running(url, folder / "other", environment)
    assert other.process.wait(timeout=60) == 2
    other.close()
    said = other.log.read_text()
    assert f"oriel gateway: the policies cannot be fetched: {url} cannot be listed: no connection" in said
    assert "Traceback" not in said
    secrets = [value for name, value in environment.items() if "KEY" in name and value != "of-a-test"]
    assert not any(secret in text for secret in secrets for text in [*told, said])


def test_check_takes_a_url(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point_to(monkeypatch, server)
    server.put("check/all.toml", POLICIES.encode() + tenant("one"))
    assert main(["policies", "check", f"{server.url}/check"]) == 0
    assert "good: 1 tenants, 1 routes, 1 pools" in capsys.readouterr().out
    server.put("check/more.toml", b"[tiers.silver]\nband = -1\ntarget_ms = 1\n")
    assert main(["policies", "check", f"{server.url}/check"]) == 1
    assert "more.toml: tiers.silver.band" in capsys.readouterr().err
    assert main(["policies", "check", f"{server.url}/nothing-there"]) == 1
    assert "holds no .toml document" in capsys.readouterr().err
    missing = f"{server.url.replace(server.bucket, 'no-such-bucket')}/x"
    assert main(["policies", "check", missing]) == 1
    assert "there is no such bucket or container (404)" in capsys.readouterr().err


def test_a_prefix_with_too_many_objects_is_refused(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point_to(monkeypatch, server)
    monkeypatch.setattr("oriel_gateway.documents.stored.MAX_OBJECTS", 3)
    server.put_many({f"crowd/models/{place}": b"x" for place in range(3)} | {"crowd/all.toml": POLICIES.encode()})
    assert main(["policies", "check", f"{server.url}/crowd"]) == 1
    assert "holds more than 3 objects: give policies a prefix alone" in capsys.readouterr().err


def test_credentials_do_not_belong_into_the_url(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gateway", "--policies", "s3://key:s3cret@bucket/x"])
    said = capsys.readouterr().err
    assert "takes no credentials" in said and "s3cret" not in said


@pytest.mark.parametrize(("url", "extra"), [("s3://b00/x", "s3"), ("gs://b00/x", "gcs"), ("az://a00/c00", "azure")])
def test_without_the_package_the_extra_is_named(
    url: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("obstore", "obstore.exceptions", "aiobotocore.config"):
        monkeypatch.setitem(sys.modules, package, None)
    for module in ("obstore", "s3", "s3_http"):
        monkeypatch.delitem(sys.modules, f"oriel_wire.objects.{module}", raising=False)
    assert main(["policies", "check", url]) == 2
    assert f"pip install 'oriel-serving[{extra}]'" in capsys.readouterr().err


def test_an_account_key_that_is_none_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", f"!{ACCOUNT_KEY}")
    assert main(["policies", "check", "az://account/container"]) == 2
    said = capsys.readouterr().err
    assert "credentials or the endpoint in the environment cannot be used" in said and ACCOUNT_KEY not in said
