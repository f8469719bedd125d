"""A server on a repository that somebody else writes opens nothing outside of it and leaves nothing in it."""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from onnx import TensorProto, external_data_helper

from ..waiting import wait_until
from . import models
from .hostile_models import WARM, labelled


class Server:
    """`oriel inference` as a process, behind `prefix`."""

    def __init__(self, root: Path, *arguments: str, prefix: tuple[str, ...] = ()) -> None:
        command = [*prefix, sys.executable, "-m", "oriel_cli.main", "inference", "--model-repository", str(root)]
        ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--strict-readiness=false"]
        self.process = subprocess.Popen([*command, *ports, *arguments], stderr=subprocess.PIPE, start_new_session=True)
        self.client = httpx.Client(trust_env=False, timeout=60)

    def __enter__(self) -> "Server":
        assert self.process.stderr is not None
        said = b""
        while (serves := re.search(rb"ready.*: HTTP (\d+), gRPC", said)) is None:
            line = self.process.stderr.readline()
            if not line:
                self.end()
                raise AssertionError(f"it did not start: {said[-2000:].decode(errors='replace')}")
            said += line
        self.client.base_url = f"http://127.0.0.1:{int(serves[1])}"
        return self

    def end(self) -> str:
        self.client.close()
        # strace passes no signal on: the server is its child.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            return self.process.communicate(timeout=60)[1].decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.communicate()[1].decode(errors="replace")

    def __exit__(self, *_: object) -> None:
        self.end()

    def lines(self) -> dict[tuple[str, str], tuple[str, str]]:
        found = self.client.post("/v2/repository/index", json={}).json()
        return {(e["name"], e.get("version", "")): (e["state"], e.get("reason", "")) for e in found}

    def infer(self, name: str) -> int:
        row = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
        return self.client.post(f"/v2/models/{name}/infer", json=row).status_code

    def until(self, predicate: Callable[[dict[tuple[str, str], tuple[str, str]]], bool]) -> None:
        wait_until(lambda: predicate(self.lines()))


def hostile(root: Path, outside: Path) -> None:
    """One good model among many that reach for `outside`."""
    models.put(root, "good", models.double(), models.DOUBLE.replace('"double"', '"good"'))
    plain = models.DOUBLE.replace('name: "double"', "")
    models.put(outside, "stolen", models.double(), plain)
    secret = outside / "secret"
    secret.write_bytes(bytes(16))
    (root / "linked").symlink_to(outside / "stolen")
    for name, where, target in (
        ("version", "1", outside / "stolen/1"),
        ("file", "1/model.onnx", outside / "stolen/1/model.onnx"),
        ("beside", "1/weights.bin", secret),
        ("config", "config.pbtxt", outside / "stolen/config.pbtxt"),
    ):
        path = models.put(root, name, models.double(), plain) / where
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    relative = os.path.relpath(secret, root / "x")
    models.put(root, "climb", models.double(), plain + f'default_model_filename: "../{relative}"')
    models.put(root, "absolute", models.double(), plain + f'default_model_filename: "{secret}"')
    models.put(
        root,
        "label",
        models.double(),
        labelled(str(secret)).replace('name: "double"', ""),
    )
    models.put(root, "warm", models.double(), plain + WARM.replace("FILE", str(secret)))
    for name, location in (
        ("weights", str(secret)),
        ("above", f"../../../{outside.name}/secret"),
        ("hop", "hop/secret"),
    ):
        model = models.lookup()
        tensor = model.graph.initializer[0]
        external_data_helper.set_external_data(tensor, location=location)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        folder = models.put(root, name, None, None) / "1"
        (folder / "model.onnx").write_bytes(model.SerializeToString())
    (root / "hop/1/hop").symlink_to(outside)


@pytest.mark.long
def test_nothing_outside_is_opened_strace_says(tmp_path: Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("needs strace")
    root, outside, trace = tmp_path / "root", tmp_path / "outside", tmp_path / "trace"
    hostile(root, outside)
    if subprocess.run([strace, "-o", os.devnull, "true"], capture_output=True).returncode != 0:
        pytest.skip("strace may not trace here")
    changing = "truncate,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,symlink,symlinkat,link,linkat"
    calls = f"trace=open,openat,openat2,creat,execve,{changing}"
    prefix = (strace, "-f", "-qq", "-y", "-s", "4096", "-e", calls, "-o", str(trace))
    poll = ("--model-control-mode", "poll", "--repository-poll-secs", "0.2")
    with Server(root, *poll, prefix=prefix) as server:
        models.put(tmp_path / "up", "comes", models.double(), models.DOUBLE.replace('"double"', '"comes"'))
        (tmp_path / "up/comes").rename(root / "comes")
        server.until(lambda lines: lines.get(("comes", "1"), ("",))[0] == "READY")  # polls have scanned everything
        lines = server.lines()
        assert server.infer("good") == 200
    ready = {name for (name, _), (state, _) in lines.items() if state == "READY"}
    assert ready == {"good", "comes"}
    assert {name for name, _ in lines} >= {path.name for path in root.iterdir()}
    text = trace.read_text(errors="replace").splitlines()
    opened = [line for line in text if re.search(r" = \d+<", line)]
    assert any(f"<{root}/good/1/model.onnx>" in line for line in opened), "the trace does not show what was opened"
    # -y resolves every descriptor: a link that was followed would show here under the name it leads to.
    assert [line for line in opened if f"= {outside}" in line or f"<{outside}" in line] == []
    assert [line for line in text if str(outside) in line] == [], "it was asked for, if in vain"
    writing = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC|^\S*\s*(creat|truncate|rename|unlink|mkdir|symlink|link)")
    written = [line for line in text if str(root) in line and writing.search(line.partition(" ")[2].lstrip() or line)]
    assert written == [], "something was written into the repository"


def tree(root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        digest.update(f"{path.relative_to(root)} {status.st_mode} {status.st_size} {status.st_mtime_ns}".encode())
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def test_two_servers_follow_one_folder_and_leave_no_trace_in_it(tmp_path: Path) -> None:
    """Two servers of different versions poll the same folder during an upgrade, while models come, change and go.

    A configuration with a field that only newer servers know stands for what the owner of the newer one writes. The
    older
    server refuses it by name and continues with the models it has.
    """
    root = tmp_path / "root"
    plain = models.DOUBLE.replace('name: "double"', "")
    for name in ("stays", "changes", "goes"):
        models.put(root, name, models.double(), plain)
    poll = ("--model-control-mode", "poll", "--repository-poll-secs", "0.1")
    with Server(root, *poll) as one, Server(root, *poll) as two:
        servers = (one, two)

        def both(predicate: Callable[[dict[tuple[str, str], tuple[str, str]]], bool]) -> None:
            before = tree(root)
            for server in servers:
                server.until(predicate)
            for server in servers:
                assert server.infer("stays") == 200
            assert tree(root) == before, "a server wrote into the repository"

        both(lambda lines: len(lines) == 3 and all(state == "READY" for state, _ in lines.values()))
        models.put(tmp_path / "up", "comes", models.double(), plain)
        (tmp_path / "up/comes").rename(root / "comes")
        both(lambda lines: lines.get(("comes", "1"), ("",))[0] == "READY")
        models.put(root, "changes", models.double(), version=2)
        both(lambda lines: ("changes", "2") in lines and lines["changes", "2"][0] == "READY")
        # the same version, exchanged by renaming folders
        models.put(tmp_path / "up", "swap", models.double())
        (root / "changes/2").rename(tmp_path / "up/old")
        (tmp_path / "up/swap/1").rename(root / "changes/2")
        both(lambda lines: lines.get(("changes", "2")) == ("READY", ""))
        shutil.rmtree(root / "goes")
        both(lambda lines: ("goes", "1") not in lines)
        (root / "changes/config.pbtxt").write_text(plain + "\nfield_of_the_future: 1\n")
        both(lambda lines: 'no field named "field_of_the_future"' in lines["changes", "2"][1])
        for server in servers:
            assert server.lines()["changes", "2"][0] == "READY" and server.infer("changes") == 200
        (root / "changes/config.pbtxt").write_text(plain)
        both(lambda lines: lines["changes", "2"] == ("READY", ""))
