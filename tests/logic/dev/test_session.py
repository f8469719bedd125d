"""`oriel logic dev` as a process: what it prints, what it serves, what is left when it ends."""

import contextlib
import itertools
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from oriel_cli.main import main

from ..processes import STOP_S, Process, until_gone

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


class Dev(Process):
    """`oriel logic dev` with these words."""

    def __init__(self, log: Path, folder: Path, *words: str) -> None:
        super().__init__([sys.executable, "-m", "oriel_cli.main", "logic", "dev", *words], log, folder=folder)

    def url(self) -> str:
        self.printed(LAST_LINE)
        return self.printed(r"label +POST (http://\S+)")[1]


def save(path: Path, text: str) -> None:
    """Replace a handler's file at once: a poll that saw it empty would count one save more."""
    aside = path.parent.with_name("aside.py")
    aside.write_text(text)
    aside.replace(path)


@pytest.fixture
def dev(tmp_path: Path) -> Iterator[Callable[..., Dev]]:
    """dev(*words): run in a folder with `label.py`."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "label.py").write_text(LABEL)
    with contextlib.ExitStack() as running:
        logs = itertools.count()
        yield lambda *words: running.enter_context(Dev(tmp_path / f"log{next(logs)}", folder, *words))


def test_two_beside_each_other_until_ctrl_c(dev: Callable[..., Dev], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = dev("label.py", "--http-port", port)
        assert refused.popen.wait(STOP_S) == 2
    assert f"port {port} on 127.0.0.1 is in use" in refused.log.read_text()
    lonely = dev("label.py", "--inference", f"127.0.0.1:{port}")
    lonely.url()
    assert f"nobody answers at http://127.0.0.1:{port}: write a fakes.py, or pass" in lonely.log.read_text()
    (tmp_path / "mine" / "fakes.py").write_text(FAKES)
    process = dev("label.py")
    assert process.url() != lonely.url(), "a port that is taken is passed over"
    assert httpx.post(process.url(), timeout=60).json() == {"label": 42}
    assert "models  digits: faked by fakes.py\n" in process.log.read_text()
    children = process.descendants()
    assert children
    assert process.stop(signal.SIGINT) == 0
    until_gone(children)
    assert "Traceback" not in process.log.read_text()


def test_saving_reloads_and_a_broken_or_superseded_save_leaves_the_old_code(
    dev: Callable[..., Dev], tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    (folder / "fakes.py").write_text(FAKES)
    (folder / "wrong.py").write_text(LABEL.replace('["label"]', '["lable"]'))
    for name in ("label", "wrong"):
        (folder / f"{name}.sample.json").write_text("{}")
    process = dev(".")
    url = process.url()
    process.printed(r"\nlabel answers label\.sample\.json\n")
    process.printed(r"\nwrong\.py:7: KeyError: .* \(its self-test with wrong\.sample\.json failed\)\n")
    assert httpx.post(url, timeout=60).json() == {"label": 42}
    handler = folder / "label.py"
    save(handler, LABEL.replace('"label":', '"digit":'))
    process.printed(r"\d label: reloading \(save 1\)\n")
    process.printed(r"\d label: reloaded \(save 1\)\n")
    assert httpx.post(url, timeout=60).json() == {"digit": 42}
    save(handler, LABEL + "x = (\n")
    process.printed(r" label\.py:8: SyntaxError: '\(' was never closed; the old code keeps serving \(save 2\)\n")
    save(handler, LABEL.replace('["label"]', '["lable"]'))
    process.printed(
        r" label\.py:7: KeyError: .* gave no output 'lable': it gave label\" \(its self-test with "
        r"label\.sample\.json failed\); the old code keeps"
    )
    assert httpx.post(url, timeout=60).json() == {"digit": 42}
    save(handler, LABEL.replace('"label":', '"number":'))
    process.printed(r"label: reloaded \(save 4\)\n")
    assert httpx.post(url, timeout=60).json() == {"number": 42}
    save(handler, "import time\nwhile True:\n    time.sleep(1)\n" + LABEL)
    process.printed(r"label: reloading \(save 5\)\n")
    save(handler, LABEL)
    process.printed(r"label: save 5 is superseded, reloading \(save 6\)\n")
    process.printed(r"label: reloaded \(save 6\)\n")
    assert httpx.post(url, timeout=60).json() == {"label": 42}
    assert "reloaded (save 5)" not in process.log.read_text()
    save(folder / "another.py", LABEL)
    assert httpx.post(process.printed(r"another  POST (http://\S+)")[1], timeout=60).json() == {"label": 42}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_model_repository_is_served_and_gone_with_it(dev: Callable[..., Dev], how: signal.Signals) -> None:
    pytest.importorskip("onnxruntime")
    process = dev("label.py", "--model-repository", str(ROOT / "examples" / "models"))
    assert httpx.post(process.url(), timeout=60).json()["label"] in range(10)
    assert re.search(r"models  digits at http://127\.0\.0\.1:\d+\n", process.log.read_text())
    children = process.descendants()
    process.stop(how)
    until_gone(children)


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
