"""A repository written by somebody else: what it may not do, and that nothing outside of it is opened."""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from onnx import TensorProto, external_data_helper

from oriel_inference.backends import Session, find_backend
from oriel_inference.errors import LoadFailed
from oriel_inference.model import EngineOptions
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.stores.local import MAX_ENTRIES, LocalStore

from ..waiting import wait_until
from . import models


def labelled(filename: str) -> str:
    start, _, end = models.DOUBLE.rpartition("dims: [ 4 ]")
    return f'{start}dims: [ 4 ] label_filename: "{filename}"{end}'


LABELS = labelled("labels.txt")
WARM = """
    model_warmup [ { name: "w" batch_size: 1
      inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 4 ] input_data_file: "FILE" } } } ]
"""


def load(root: Path, **more: Any) -> dict[int, LoadedVersion | LoadFailed | None]:
    store = more.pop("store", None) or LocalStore(root)
    return load_model(Loading(store, "double", find_backend=find_backend, cores=1, models=1, **more))


def refusal(root: Path, **more: Any) -> str:
    try:
        (found,) = load(root, **more).values()
    except LoadFailed as failure:
        found = failure
    assert isinstance(found, LoadFailed), "it was loaded"
    assert str(root) not in found.reason and len(found.reason) <= 500
    return found.reason


# --- files that are none ------------------------------------------------------------------------------------------


def device(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root makes devices")
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero: reading it would never end
    except PermissionError:
        pytest.skip("devices cannot be made here")


def listening(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)
    try:
        made = socket.socket(socket.AF_UNIX)
        made.bind(f"/proc/self/fd/{here}/{path.name}")  # socket paths are short
        made.close()
    finally:
        os.close(here)


def pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [device, pipe, listening])
@pytest.mark.parametrize("where", ["1/model.onnx", "1/beside.bin", "config.pbtxt", "labels.txt", "warmup/data"])
def test_what_is_no_file_is_refused_and_blocks_nothing(
    tmp_path: Path, make: Callable[[Path], None], where: str
) -> None:
    models.put(tmp_path, "double", models.double(), LABELS + WARM.replace("FILE", "data"))
    (tmp_path / "double/warmup").mkdir()
    (tmp_path / "double/warmup/data").write_bytes(bytes(16))
    (tmp_path / "double/labels.txt").write_text("a\n")
    path = tmp_path / "double" / where
    path.unlink(missing_ok=True)
    make(path)
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(refusal(tmp_path)), daemon=True)
    thread.start()
    thread.join(60)
    assert said, "it blocked"
    assert Path(where).name in said[0] and re.search(
        r"pipes, sockets and devices|is not a file|cannot be read", said[0]
    )
    LocalStore(tmp_path).fingerprint("double")  # nor does scanning it


def test_huge_device_like_file_is_not_read(tmp_path: Path) -> None:
    """Sparse: it costs its writer nothing."""
    path = models.put(tmp_path, "double", models.double(), models.DOUBLE) / "1/model.onnx"
    os.truncate(path, 17 << 30)
    assert refusal(tmp_path) == "double/1 holds more than 17179869184 bytes"


# --- bounds, set small --------------------------------------------------------------------------------------------


def test_size_of_a_version_is_bounded(tmp_path: Path) -> None:
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    (tmp_path / "double/1/weights.bin").write_bytes(bytes(1000))
    store = LocalStore(tmp_path, max_version_bytes=1000)
    assert refusal(tmp_path, store=store) == "double/1 holds more than 1000 bytes"


def test_private_copy_is_bounded(tmp_path: Path) -> None:
    folder = models.put(tmp_path, "double", models.double(), models.DOUBLE)
    into = tmp_path / "copy"
    into.mkdir()
    size = (folder / "1/model.onnx").stat().st_size
    assert not LocalStore(tmp_path, max_copy_bytes=size - 1).copy("double", 1, into)
    assert list(into.iterdir()) == []
    assert LocalStore(tmp_path, max_copy_bytes=size).copy("double", 1, into)
    assert (into / "model.onnx").read_bytes() == (folder / "1/model.onnx").read_bytes()


@pytest.mark.parametrize("why", ["no folder", "no space"])
def test_model_loads_where_it_lies_if_no_copy_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(28, "No space left on device")

    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    store = LocalStore(tmp_path)
    if why == "no folder":
        monkeypatch.setattr("oriel_inference.repository.private.mkdtemp", fail)
    else:
        monkeypatch.setattr(store, "copy", fail)
    assert isinstance(load(tmp_path, store=store)[1], LoadedVersion)


def test_private_copies_are_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    models.put(tmp_path / "root", "double", models.double(), models.DOUBLE)
    assert isinstance(load(tmp_path / "root")[1], LoadedVersion)
    (tmp_path / "root/double/1/model.onnx").write_bytes(b"junk")
    assert isinstance(load(tmp_path / "root")[1], LoadFailed)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(("name", "config"), [("config.pbtxt", None), ("labels.txt", LABELS)])
def test_small_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, config: str) -> None:
    monkeypatch.setattr("oriel_inference.stores.local.MAX_TEXT_BYTES", 1000)
    models.put(tmp_path, "double", models.double(), config)
    (tmp_path / "double" / name).write_text("#" * 1001)
    assert refusal(tmp_path) == f"double/{name} is larger than 1000 bytes"


def test_far_more_files_than_a_version_may_have_cost_a_bounded_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real bound is tried with an upload to a running server, in `make test-long`: test_control.py."""
    assert MAX_ENTRIES == 10_000
    folder = models.put(tmp_path, "double", models.double(), models.DOUBLE) / "1"
    for number in range(2000):
        (folder / f"f{number}").touch()
    looked: set[str] = set()
    for name in ("lstat", "stat", "resolve"):
        whole = getattr(Path, name)

        def counting(path: Path, *given: Any, whole: Any = whole, **more: Any) -> Any:
            if path.parent == folder:
                looked.add(path.name)
            return whole(path, *given, **more)

        monkeypatch.setattr(Path, name, counting)
    store = LocalStore(tmp_path, max_entries=100)
    assert refusal(tmp_path, store=store) == "double/1 has more than 100 entries"
    store.fingerprint("double")
    assert len(looked) <= 2 * 101


def test_a_look_enters_only_so_many_folders(tmp_path: Path) -> None:
    folder = models.put(tmp_path, "double", models.double(), models.DOUBLE) / "1"
    store = LocalStore(tmp_path)
    before = store.fingerprint("double")
    deep = folder / "/".join("d" * 16)
    deep.mkdir(parents=True)
    seen = store.fingerprint("double")
    assert seen != before
    (deep / "f").touch()
    assert store.fingerprint("double").shared == seen.shared
    (folder / "d/f").touch()
    assert store.fingerprint("double") != seen


# --- names and links ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "./x", "a//b", ""])
@pytest.mark.parametrize("kind", ["default_model_filename", "label_filename", "warmup"])
def test_names_cannot_climb(tmp_path: Path, name: str, kind: str) -> None:
    configs = {
        "default_model_filename": models.DOUBLE + f'default_model_filename: "{name}"',
        "label_filename": labelled(name),
        "warmup": models.DOUBLE + WARM.replace("FILE", name),
    }
    if not name and kind != "warmup":
        pytest.skip("empty means none")
    models.put(tmp_path, "double", models.double(), configs[kind])
    (tmp_path / "secret").write_bytes(bytes(16))
    assert "stay inside the model's folder" in refusal(tmp_path)


@pytest.mark.parametrize("what", ["model", "1", "1/model.onnx", "1/deep", "config.pbtxt", "labels.txt", "warmup"])
def test_links_out_are_refused(tmp_path: Path, what: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    folder = models.put(root, "double", models.double(), LABELS + WARM.replace("FILE", "data"))
    (folder / "warmup").mkdir()
    (folder / "warmup/data").write_bytes(bytes(16))
    (folder / "labels.txt").write_text("a\n")
    (folder / "1/deep").mkdir()
    path = folder if what == "model" else folder / what
    shutil.move(path, outside / "moved")
    path.symlink_to(outside / "moved")
    assert "leads out of the model repository" in refusal(root)


def test_weights_behind_a_link_are_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    model = models.lookup()
    tensor = model.graph.initializer[0]
    (outside / "w.bin").write_bytes(tensor.raw_data)
    external_data_helper.set_external_data(tensor, location="deep/w.bin")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    folder = models.put(root, "double", None, "") / "1"
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    (folder / "deep").symlink_to(outside)
    assert "deep leads out of the model repository" in refusal(root)


def test_file_nobody_may_read_is_refused() -> None:
    root = Path(tempfile.mkdtemp(prefix="oriel-test-"))
    try:
        root.chmod(0o755)
        folder = models.put(root, "double", models.double(), models.DOUBLE)
        (folder / "1/model.onnx").chmod(0)
        with as_nobody():
            assert refusal(root) == "double/1/model.onnx cannot be read: Permission denied"
        (folder / "config.pbtxt").chmod(0)
        with as_nobody():
            assert refusal(root) == "double/config.pbtxt cannot be read: Permission denied"
        folder.chmod(0)
        with as_nobody():
            assert "cannot be" in refusal(root) or "Permission" in refusal(root)
    finally:
        folder.chmod(0o755)
        shutil.rmtree(root)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Root reads everything."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


# --- swaps --------------------------------------------------------------------------------------------------------


class Swap:
    """A check during which somebody else is busy."""

    def __init__(self, do: Callable[[], None]) -> None:
        self.do = do
        self.seen: list[bytes] = []

    def check(self, path: Path, shown: str, backend: str, options: EngineOptions) -> bool:
        self.do()
        self.seen.append(path.read_bytes())
        return True


class Late:
    """A backend that is opened in the very moment somebody swaps the file."""

    name = "onnxruntime"

    def __init__(self, do: Callable[[], None]) -> None:
        self.do = do
        self.seen: list[bytes] = []

    def open(self, path: Path, options: EngineOptions) -> Session:
        self.do()
        self.seen.append(path.read_bytes())
        return find_backend("onnxruntime").open(path, options)


@pytest.mark.parametrize("moment", ["check", "open"])
@pytest.mark.parametrize("how", ["rename", "link", "write"])
def test_file_that_is_swapped_after_its_check_is_never_opened(tmp_path: Path, how: str, moment: str) -> None:
    root = tmp_path / "root"
    path = models.put(root, "double", models.double(), models.DOUBLE) / "1/model.onnx"
    evil = tmp_path / "evil.onnx"
    evil.write_bytes(b"evil")
    good = path.read_bytes()

    def swap() -> None:
        if how == "write":
            path.write_bytes(b"evil")
        elif how == "rename":
            os.replace(shutil.copy(evil, root / "new"), path)
        else:
            path.unlink()
            path.symlink_to(evil)

    if moment == "check":
        check = Swap(swap)
        assert refusal(root, check=check) == "the files of double changed while they were being loaded"
        assert check.seen == [good], "the check saw what was put there afterwards"
    else:
        backend = Late(swap)
        with pytest.raises(LoadFailed, match="changed while they were being loaded"):
            load_model(Loading(LocalStore(root), "double", find_backend=lambda _: backend, cores=1, models=1))
        assert backend.seen == [good], "the runtime saw what nobody had checked"


def test_folder_that_becomes_a_link_after_it_was_resolved_is_not_read(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    folder = models.put(root, "double", models.double(), models.DOUBLE)
    models.put(outside, "double", models.double(), "max_batch_size: 3")

    class Busy(LocalStore):
        def _inside(self, *parts: str) -> Path:
            found = super()._inside(*parts)
            if parts[-1] == "config.pbtxt" and not folder.is_symlink():
                folder.rename(tmp_path / "away")
                folder.symlink_to(outside / "double")
            return found

    with pytest.raises(LoadFailed, match="leads out of the model repository"):
        Busy(root).text("double", "config.pbtxt")


# --- the server on it, from outside -------------------------------------------------------------------------------


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
    """A rolling upgrade: an old and a new server poll the same folder while models come, change and go. A configuration
    with a field that only newer servers know stands for what the new one's owner writes: the old one refuses it by name
    and goes on with what it has."""
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
