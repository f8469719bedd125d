"""`oriel logic dev` as a process: what it prints, what it serves, what is left when it ends."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from oriel_cli.main import main

from ...waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
LABEL = """
from oriel_logic import service

@service
async def label(request, models, ctx):
    outputs = await models.infer("digits", {"image": [[0.0] * 64]})
    return {"label": int(outputs["label"][0, 0])}
"""
FAKES = """
from oriel_logic.testing import FakeModels
models = FakeModels({"digits": {"label": [[42]]}})
"""
LAST_LINE = "Ctrl-C ends."

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Process:
    """`oriel logic dev` with these words, its output in a file."""

    def __init__(self, log: Path, folder: Path, *words: str) -> None:
        self.log = log
        path = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        command = [sys.executable, "-m", "oriel_cli.main", "logic", "dev", *words]
        with log.open("w") as output:
            self.popen = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=os.environ | path)

    def said(self, pattern: str) -> str:
        """Wait for it; its first group."""
        found = wait_until(lambda: re.search(pattern, self.log.read_text()) or self.popen.poll() is not None)
        assert not isinstance(found, bool), self.log.read_text()
        return str(found[1] if found.groups() else found[0])

    def url(self) -> str:
        self.said(LAST_LINE)
        return self.said(r"POST (http://\S+)")

    def descendants(self) -> list[int]:
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        found = [self.popen.pid]
        for pid in found:
            found += [each for each, parent in parents.items() if parent == pid]
        return found[1:]


def save(path: Path, text: str) -> None:
    """Replace a handler's file at once: a poll that saw it empty would count one save more."""
    aside = path.parent.with_name("aside.py")
    aside.write_text(text)
    aside.replace(path)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def dev(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """dev(*words): run in a folder with `label.py`."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "label.py").write_text(LABEL)
    started = []

    def start(*words: str) -> Process:
        started.append(Process(tmp_path / f"log{len(started)}", folder, *words))
        return started[-1]

    yield start
    for each in started:
        if each.popen.poll() is None:
            each.popen.kill()
        each.popen.wait()


def test_a_service_beside_its_fakes_until_ctrl_c(dev: Callable[..., Process], tmp_path: Path) -> None:
    (tmp_path / "mine" / "fakes.py").write_text(FAKES)
    process = dev("label.py")
    url = process.url()
    assert httpx.post(url).json() == {"label": 42}
    assert "models  digits: faked by fakes.py\n" in process.log.read_text()
    children = process.descendants()
    assert children
    process.popen.send_signal(signal.SIGINT)
    assert process.popen.wait(30) == 0
    assert wait_until(lambda: all(map(is_gone, children)))
    assert "Traceback" not in process.log.read_text()


def test_saving_reloads_and_a_broken_save_leaves_the_old_code(dev: Callable[..., Process], tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    (folder / "fakes.py").write_text(FAKES)
    (folder / "label.sample.json").write_text("{}")
    process = dev(".")
    url = process.url()
    assert httpx.post(url).json() == {"label": 42}
    handler = folder / "label.py"
    save(handler, LABEL.replace('"label":', '"digit":'))
    process.said(r"\d label: reloading \(save 1\)\n")
    process.said(r"\d label: reloaded \(save 1\)\n")
    assert httpx.post(url).json() == {"digit": 42}
    save(handler, LABEL + "x = (\n")
    process.said(r" label\.py:8: SyntaxError: '\(' was never closed; the old code keeps serving \(save 2\)\n")
    save(handler, LABEL.replace('["label"]', '["lable"]'))
    process.said(
        r" label\.py:7: KeyError: .* gave no output 'lable': it gave label\" \(its self-test with "
        r"label\.sample\.json failed\); the old code keeps"
    )
    assert httpx.post(url).json() == {"digit": 42}
    save(handler, LABEL.replace('"label":', '"number":'))
    process.said(r"label: reloaded \(save 4\)\n")
    assert httpx.post(url).json() == {"number": 42}
    save(folder / "another.py", LABEL)
    assert httpx.post(process.said(r"another  POST (http://\S+)")).json() == {"label": 42}


def test_a_save_that_another_one_supersedes_is_named(dev: Callable[..., Process], tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    (folder / "fakes.py").write_text(FAKES)
    process = dev(".")
    url = process.url()
    handler = folder / "label.py"
    endless = "import time\nwhile True:\n    time.sleep(1)\n"
    save(handler, endless + LABEL)
    process.said(r"label: reloading \(save 1\)\n")
    save(handler, LABEL.replace('"label":', '"digit":'))
    process.said(r"label: save 1 is superseded, reloading \(save 2\)\n")
    process.said(r"label: reloaded \(save 2\)\n")
    assert httpx.post(url).json() == {"digit": 42}
    assert "reloaded (save 1)" not in process.log.read_text()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (LABEL, r"\nlabel answers label\.sample\.json\n"),
        (
            LABEL.replace('["label"]', '["lable"]'),
            r"\nlabel\.py:7: KeyError: .* gave no output 'lable'.* \(its self-test with label\.sample\.json failed\)\n",
        ),
    ],
)
def test_the_sample_is_tried_at_the_start(dev: Callable[..., Process], tmp_path: Path, code: str, said: str) -> None:
    folder = tmp_path / "mine"
    (folder / "fakes.py").write_text(FAKES)
    (folder / "label.sample.json").write_text("{}")
    (folder / "label.py").write_text(code)
    dev("label.py").said(said)


def test_a_port_that_is_taken_is_passed_over_unless_it_was_asked_for(
    dev: Callable[..., Process], tmp_path: Path
) -> None:
    (tmp_path / "mine" / "fakes.py").write_text(FAKES)
    first, second = dev("label.py"), dev("label.py")
    urls = {first.url(), second.url()}
    assert len(urls) == 2 and all(httpx.post(url).status_code == 200 for url in urls)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        third = dev("label.py", "--http-port", str(port))
        assert third.popen.wait(30) == 2
    assert f"port {port} on 127.0.0.1 is in use" in third.log.read_text()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_model_repository_is_served_and_gone_with_it(dev: Callable[..., Process], how: signal.Signals) -> None:
    pytest.importorskip("onnxruntime")
    process = dev("label.py", "--model-repository", str(ROOT / "examples" / "models"))
    assert httpx.post(process.url(), timeout=30).json()["label"] in range(10)
    assert re.search(r"models  digits at http://127\.0\.0\.1:\d+\n", process.log.read_text())
    children = process.descendants()
    process.popen.send_signal(how)
    process.popen.wait(30)
    assert wait_until(lambda: all(map(is_gone, children)))


def test_without_models_it_says_how_to_get_some(dev: Callable[..., Process]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    process = dev("label.py", "--inference", f"127.0.0.1:{port}")
    process.url()
    assert f"nobody answers at http://127.0.0.1:{port}: write a fakes.py, or pass" in process.log.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "there is no nothing: make one with 'oriel logic new nothing'"),
        (["label.py", "--model-repository", "nowhere"], "there is no folder nowhere: pass --model-repository DIR"),
        (["label.py", "--inference", "x:1", "--model-repository", "."], "pass one of them"),
        (["label.py", "--workers", "0"], "pass --workers N"),
    ],
)
def test_wrong_words_are_one_line_with_the_remedy(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "label.py").write_text(LABEL)
    monkeypatch.chdir(tmp_path)
    assert main(["logic", "dev", *words]) == 2
    text = capsys.readouterr().err
    assert said in text and text.count("\n") == 1
