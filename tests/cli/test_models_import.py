"""`oriel models import`: a model of another framework becomes a folder, or the command says why not and leaves none."""

import errno
import io
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from oriel_cli.main import main

from ..inference import models

HOSTILE = """
import os, socket
seen = dict(os.environ)
try:
    socket.create_connection(("127.0.0.1", {port}), 5)
    seen["network"] = "reached"
except OSError:
    pass
open({path!r}, "w").write(repr(seen))
os._exit(3)
"""


# Stands for the Python of an environment that converts language models.
CONVERTER = """
import json, sys
from pathlib import Path
import numpy as np
request = json.loads(sys.argv[1])
assert request["framework"] == "language", request
out = Path(request["out"])
Path(request["folder"], "model.gguf").write_bytes(b"GGUF")
np.savez(out / "inputs.npz", input_ids=[[259, *b"hello", 261]])
np.savez(out / "expected.npz", tokens=[[104, 101, {token}, -1]], probabilities=np.float32([[{share}] * 3 + [0]]))
result = {{"config": {config!r}, "notes": [], "original_ms": 1.0}}
(out / "result.json").write_text(json.dumps(result))
"""
DOUBLE = 'backend: "language" parameters { key: "oriel.engine" value { string_value: "double" } }'


class Code:
    """Pickles as a call of `exec`."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> Any:
        return exec, (self.text,)


@pytest.fixture(scope="module")
def iris(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows, kinds = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[kinds]
    path = tmp_path_factory.mktemp("iris") / "iris.joblib"
    joblib.dump(make_pipeline(StandardScaler(), LogisticRegression()).fit(rows, names), path)
    return path


def imported(source: Path, root: Path, *words: str) -> int:
    return main(["models", "import", str(source), "--repository", str(root), *words])


def test_pickled_pipeline_becomes_a_folder_that_answers_the_same(
    iris: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert imported(iris, tmp_path / "models", "--trust-file", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["framework"], found["runs_on"], found["rows"]) == ("iris", "sklearn", "CPU", 8)
    label, probabilities = found["outputs"]
    assert label["original"] == label["converted"] and label["error"]["outside"] == 0
    assert probabilities["shape"] == [8, 3] and 0 <= probabilities["error"]["absolute"] < 1e-5
    assert main(["models", "check", str(tmp_path / "models")]) == 0
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["iris"], "nothing else is left"


def test_outputs_beyond_the_tolerance_leave_no_folder(
    iris: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.npz"
    np.savez(rows, X=load_iris(return_X_y=True)[0].astype(np.float32))
    words = ("--trust-file", "--inputs", str(rows), "--tolerance")
    assert imported(iris, tmp_path / "models", *words, "absolute=0") == 1
    said = capsys.readouterr()
    assert "150 rows: the original takes" in said.out and "probabilities  [150, 3]" in said.out
    assert "output 'probabilities' differs in" in said.err and "Nothing was written" in said.err
    assert not (tmp_path / "models").exists()
    assert imported(iris, tmp_path / "models", *words, "absolute=1e-5") == 0


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 1), (None, 1)])
def test_pickle_is_opened_only_by_somebody_who_trusts_it(
    answer: str | None, code: int, iris: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", terminal := io.StringIO(answer or ""))
    monkeypatch.setattr(terminal, "isatty", lambda: answer is not None)
    assert imported(iris, tmp_path / "models") == code
    assert (tmp_path / "models/iris/1/model.onnx").exists() is not bool(code)


def test_code_of_a_pickle_gets_no_secret_no_network_and_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = HOSTILE.format(port=server.getsockname()[1], path=str(tmp_path / "seen"))
        (tmp_path / "bad.pkl").write_bytes(pickle.dumps(Code(code)))
        assert imported(tmp_path / "bad.pkl", tmp_path / "models", "--trust-file") == 1
    said = capsys.readouterr().err
    seen = (tmp_path / "seen").read_text()
    assert "secret" not in seen and str(os.environ["PATH"]) in seen
    assert "reached" not in seen or "the kernel does not let this process give up the network" in said
    assert "bad.pkl was not converted: its process ended with code 3" in said
    assert not (tmp_path / "models").exists()


def test_conversion_that_hangs_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.pkl").write_bytes(pickle.dumps(Code("while True: pass")))
    assert imported(tmp_path / "bad.pkl", tmp_path / "models", "--trust-file", "--seconds", "1") == 1
    assert "it took more than 1 s" in capsys.readouterr().err


def test_process_that_left_the_conversion_does_not_hold_it_up(tmp_path: Path) -> None:
    (tmp_path / "bad.pkl").write_bytes(
        pickle.dumps(Code("import os, time\nif os.fork() == 0: os.setsid(); time.sleep(30); os._exit(0)\nos._exit(3)"))
    )
    began = time.monotonic()
    assert imported(tmp_path / "bad.pkl", tmp_path / "models", "--trust-file") == 1
    assert time.monotonic() - began < 25


def test_interrupted_conversion_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "bad.pkl").write_bytes(pickle.dumps(Code("import time; print(7, flush=True); time.sleep(60)")))
    words = ("models", "import", str(tmp_path / "bad.pkl"), "--repository", str(tmp_path / "models"), "--trust-file")
    command = [sys.executable, "-c", "import sys; from oriel_cli.main import main; sys.exit(main())", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while b"opening and converting" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_copy_that_fails_leaves_nothing_in_the_repository(
    iris: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(source: Path, target: Path) -> None:
        target.mkdir(parents=True)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copytree", full)
    assert imported(iris, tmp_path / "models", "--trust-file") == 1
    assert "iris/1 was not written: [Errno 28] No space left on device" in capsys.readouterr().err
    assert list((tmp_path / "models").iterdir()) == []


def test_half_of_a_result_is_an_error_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import json, os, sys\nopen(json.loads(sys.argv[1])['out'] + '/result.json', 'w').write('{')\nos._exit(4)"
    (tmp_path / "bad.pkl").write_bytes(pickle.dumps(Code(code)))
    assert imported(tmp_path / "bad.pkl", tmp_path / "models", "--trust-file") == 1
    assert "bad.pkl was not converted: its process ended with code 4" in capsys.readouterr().err


def test_file_of_an_engine_is_placed_as_another_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "models"
    models.put(root, "double", models.double(), models.DOUBLE)
    (tmp_path / "new.onnx").write_bytes((root / "double/1/model.onnx").read_bytes())
    assert imported(tmp_path / "new.onnx", root, "--name", "double") == 1
    assert "double/1 is there already: pass another --version" in capsys.readouterr().err
    assert imported(tmp_path / "new.onnx", root, "--name", "double", "--version", "2") == 0
    assert "there is nothing to compare" in capsys.readouterr().out
    assert sorted(path.name for path in (root / "double").iterdir()) == ["1", "2", "config.pbtxt"]


@pytest.mark.parametrize(
    ("name", "words", "reason"),
    [
        ("model.bin", (), "pass --framework, one of sklearn, keras"),
        ("model.keras", (), "-m pip install keras tensorflow (or pass --python"),
        ("weights.pt", (), "weights.pt is a pickle, which is code and never loaded"),
        ("my model.onnx", (), "pass --name"),
        ("model.joblib", ("--trust-file",), "model.joblib was not converted: ValueError: unsupported pickle"),
    ],
)
def test_refusal_says_what_to_do(
    name: str, words: tuple[str, ...], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(b"\x80nothing")
    assert imported(tmp_path / name, tmp_path / "models", *words) == 1
    assert reason in capsys.readouterr().err


def test_gguf_file_is_placed_and_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models/chat").mkdir(parents=True)
    (tmp_path / "models/chat/config.pbtxt").write_text(DOUBLE)
    for file, data, code in (("new.gguf", b"GGUF", 0), ("bad.gguf", b"bad!", 1)):
        (tmp_path / file).write_bytes(data)
        assert imported(tmp_path / file, tmp_path / "models", "--name", "chat", "--version", str(1 + code)) == code
    said = capsys.readouterr()
    assert "language, runs on double" in said.out and "the file is damaged" in said.err
    assert sorted(path.name for path in (tmp_path / "models/chat").iterdir()) == ["1", "config.pbtxt"]
    assert (tmp_path / "models/chat/1/model.gguf").read_bytes() == b"GGUF"


@pytest.mark.parametrize(
    ("token", "share", "reason"),
    [(108, 0.6, ""), (107, 0.6, "'tokens' differs in 1 of 4"), (108, 0.9, "'probabilities' differs in 3 of 4")],
)
def test_language_model_is_converted_and_has_to_go_on_as_the_original(
    token: int, share: float, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "convert.py").write_text(CONVERTER.format(token=token, share=share, config=DOUBLE))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "convert.py"} "$3"\n')
    python.chmod(0o755)
    assert imported(tmp_path / "chat", tmp_path / "models", "--python", str(python)) == bool(reason)
    said = capsys.readouterr()
    assert "104 101" in said.out and reason in said.err
    assert (tmp_path / "models").exists() is not bool(reason)
