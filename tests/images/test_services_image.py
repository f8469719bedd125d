"""`oriel logic build`: its context and its Dockerfile, judged as our own are, and its RUN lines executed."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dockerfile import parse
from dockerfile_rules import faults
from image_stages import Root, RunFailed
from sealed_run import run_sealed

from oriel_cli.main import main
from oriel_logic.dev import build as command

ROOT = Path(__file__).resolve().parents[2]
PLAIN = """
import tomlkit
from oriel_logic import service

@service
def sentiment(text: str) -> dict[str, str]:
    return {"as_toml": tomlkit.dumps({"text": text})}
"""
CALL = '{"text": "fine"}'
# What `make wheel` leaves, and one of a version before, which is not taken.
WHEELS = [f"oriel_serving-{each}.whl" for each in ("0.0.9-py3-none-any", "0.1.0-cp311-cp311-linux_x86_64")]
WHEELS.append("oriel_serving-0.1.0-py3-none-any.whl")
LOCK = "oriel-serving==0.1.0 \\\n    --hash=sha256:abc\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a new service `sentiment` and a wheel that is none, and nobody who resolves dependencies."""
    monkeypatch.chdir(tmp_path)
    assert main(["logic", "new", "sentiment"]) == 0
    (tmp_path / "dist").mkdir()
    for name in WHEELS:
        (tmp_path / "dist" / name).write_bytes(name.encode())
    os.utime(tmp_path / "dist" / WHEELS[0], (0, 0))
    return tmp_path


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Not pytest's own: that can be entered by one user only."""
    made = Path(tempfile.mkdtemp(prefix="oriel-images-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def unresolved(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the list that records, call by call, what would have been resolved."""
    asked: list[list[str]] = []

    def locked(wanted: list[str], context: Path) -> str:
        asked.append(list(wanted))
        return LOCK

    monkeypatch.setattr(command, "locked", locked)
    return asked


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["logic", "build", *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return said.err


def test_the_context_holds_the_service_and_not_its_tests(here: Path, unresolved: list[list[str]]) -> None:
    (here / "sentiment" / ".env").write_text("SECRET=1")
    (here / "sentiment" / "prep").mkdir()
    (here / "sentiment" / "prep" / "words.txt").write_text("good")
    (here / "sentiment" / ".venv").mkdir()
    (here / "sentiment" / "env").mkdir()
    (here / "sentiment" / "env" / "pyvenv.cfg").write_text("")
    (here / "sentiment" / "env" / "large").write_text("")
    assert main(["logic", "build", "sentiment"]) == 0
    out = here / "build" / "sentiment"
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    service = {"handler.py", "pyproject.toml", "sample.json", "README.md", "prep/words.txt"}
    own = {"Dockerfile", ".dockerignore", "requirements.txt", *(f"wheels/{name}" for name in WHEELS[1:])}
    assert found == own | {f"services/sentiment/{each}" for each in service}
    assert unresolved == [["oriel-serving==0.1.0"]]


def test_the_dockerfile_keeps_the_rules_of_our_own(here: Path, unresolved: list[list[str]]) -> None:
    assert main(["logic", "build", "sentiment"]) == 0
    out = here / "build" / "sentiment"
    text = (out / "Dockerfile").read_text()
    file = parse(text)
    assert faults(file, "logic", out) == []
    assert file.targets == ["logic"] and file.names[-1] == "logic"
    ours = parse((ROOT / "logic" / "Dockerfile").read_text())
    assert {name: file.arguments[name] for name in file.arguments} == {
        name: ours.arguments[name] for name in file.arguments
    }, "the same base and the same uv"
    last, our_last = file.stage("logic"), ours.stage("logic")
    for name in ("ENV", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"):
        assert [each.text for each in last.each(name)] == [each.text for each in our_last.each(name)], name
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (its wheel is for Linux on x86-64)")
    words = [hadolint, "--config", str(ROOT / ".hadolint.yaml"), "--failure-threshold", "info", str(out / "Dockerfile")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


def test_dependencies_of_all_services_are_resolved_together(here: Path, unresolved: list[list[str]]) -> None:
    services = here / "services"
    for name, wanted in (("one", '"oriel-serving[embeddings]", "tomlkit>=0.12"'), ("two", '"Oriel_Serving", "rich"')):
        (services / name).mkdir(parents=True)
        shutil.copy(here / "sentiment" / "handler.py", services / name / "handler.py")
        (services / name / "pyproject.toml").write_text(f'[project]\nname = "{name}"\ndependencies = [{wanted}]\n')
    assert main(["logic", "build", "services", "--out", "image"]) == 0
    assert unresolved == [["oriel-serving[embeddings]==0.1.0", "tomlkit>=0.12", "rich"]]
    assert {path.name for path in (here / "image" / "services").iterdir()} == {"one", "two"}


def test_one_file_comes_with_its_neighbours(here: Path, unresolved: list[list[str]]) -> None:
    folder = here / "many"
    folder.mkdir()
    shutil.copy(here / "sentiment" / "handler.py", folder / "mood.py")
    (folder / "mood.py").write_text("import prep\n" + (folder / "mood.py").read_text())
    for name in ("prep.py", "other.py", "mood.sample.json"):
        (folder / name).write_text("")
    assert main(["logic", "build", "many/mood.py"]) == 0
    assert {path.name for path in (here / "build" / "mood" / "services").iterdir()} == {
        "mood.py",
        "prep.py",
        "mood.sample.json",
    }


def test_a_second_build_replaces_the_first_and_nothing_of_somebody_elses(
    here: Path, unresolved: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main(["logic", "build", "sentiment"]) == 0
    (here / "mine").mkdir()
    (here / "mine" / "Dockerfile").write_text("FROM scratch\n")
    assert "was not made by" in refusal(capsys, "sentiment", "--out", "mine")
    assert (here / "mine" / "Dockerfile").read_text() == "FROM scratch\n"
    assert "was not made by" in refusal(capsys, "sentiment", "--out", "sentiment")
    assert sorted(path.name for path in (here / "build").iterdir()) == ["sentiment"]


def test_what_cannot_be_built_is_one_line_with_the_remedy(
    here: Path, unresolved: list[list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no nothing" in refusal(capsys, "nothing")
    assert "'make wheel'" in refusal(capsys, "sentiment", "--wheel", "sentiment/handler.py")
    config = here / "sentiment" / "pyproject.toml"
    before = config.read_text()
    config.write_text(before + 'python = ".venv"\n')
    assert "is an environment of this machine" in refusal(capsys, "sentiment")
    config.write_text(before.replace('["oriel-serving"]', '["--index-url https://x.example"]'))
    assert "is not a requirement" in refusal(capsys, "sentiment")
    config.write_text(before)
    (here / "sentiment" / "secret.txt").symlink_to("/etc/hostname")
    assert "leads out of the folder" in refusal(capsys, "sentiment")
    assert not (here / "build" / "sentiment").exists()


def test_what_a_name_holds_is_never_read_as_dockerfile(here: Path, unresolved: list[list[str]]) -> None:
    config = here / "sentiment" / "pyproject.toml"
    evil = 'version = "1\\nRUN evil ${PATH}"'
    config.write_text(config.read_text().replace('version = "1"', evil))
    assert main(["logic", "build", "sentiment"]) == 0
    text = (here / "build" / "sentiment" / "Dockerfile").read_text()
    assert "\nRUN evil" not in text and "${PATH}" not in text.replace("/opt/oriel/bin:${PATH}", "")
    assert faults(parse(text), "logic", here / "build" / "sentiment") == []


def test_only_the_given_wheels_can_be_installed(here: Path) -> None:
    """An index may offer anything under the same name and version: it is not installed."""
    wheels = sorted((here / "dist").glob("*-0.1.0-*.whl"))
    resolved = "httpx==0.28 \\\n    --hash=sha256:aa\noriel-serving[s3]==0.1.0 \\\n    --hash=sha256:bb\nuvloop==0.22\n"
    hashes = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels]
    own = f"oriel-serving==0.1.0 \\\n    --hash=sha256:{hashes[0]} \\\n    --hash=sha256:{hashes[1]}\n"
    assert command.pinned(resolved, wheels) == f"httpx==0.28 \\\n    --hash=sha256:aa\n{own}uvloop==0.22\n"


@pytest.mark.long
def test_its_run_lines_install_the_service_and_it_answers(here: Path, open_folder: Path) -> None:
    """With the index: the lines of the Dockerfile, executed, then the service, sealed, and its answer."""
    made = here / "real"
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(made)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, env={**os.environ, "ORIEL_COMPILE": "0"})
    (wheel,) = made.glob("*.whl")
    assert "oriel_logic/dev/scaffold/Dockerfile.txt" in zipfile.ZipFile(wheel).namelist()
    config = here / "sentiment" / "pyproject.toml"
    config.write_text(config.read_text().replace('["oriel-serving"]', '["oriel-serving", "tomlkit>=0.12"]'))
    handler = here / "sentiment" / "handler.py"
    handler.write_text(PLAIN)
    if main(["logic", "build", "sentiment", "--wheel", str(wheel)]) != 0:
        pytest.skip("neither the package index nor a cache of it is in reach")
    out = here / "build" / "sentiment"
    root = Root(open_folder / "root", out, parse((out / "Dockerfile").read_text()))
    try:
        root.build("build")
        root.build("logic")
    except RunFailed as failed:
        if failed.without_index:
            pytest.skip("neither the package index nor a cache of it is in reach")
        raise
    told = run_sealed(root, parse((out / "Dockerfile").read_text()), "logic", ("/v1/services/sentiment", 8090, CALL))
    assert told.get("healthy") is True and told["code"] == 0, told
    assert told["answer"]["status"] == 200 and json.loads(told["answer"]["body"]) == {"as_toml": 'text = "fine"\n'}
    (out / "services" / "sentiment" / "handler.py").write_text("import nothing_like_it\n" + handler.read_text())
    broken = Root(root.folder, out, parse((out / "Dockerfile").read_text()))
    with pytest.raises(RunFailed, match="nothing_like_it"):
        broken.build("logic")


def test_the_model_of_the_deploy_page_scores_as_the_fake_does(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    page = (ROOT / "docs" / "deploy.md").read_text()
    block = textwrap.dedent(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    exec(block, {})
    session = onnxruntime.InferenceSession("models/sentiment_model/1/model.onnx", providers=["CPUExecutionProvider"])
    counts = np.arange(12, dtype=np.float32).reshape(2, 6)
    (score,) = session.run(None, {"counts": counts})
    fakes: dict[str, Any] = {}
    exec((here / "sentiment" / "fakes.py").read_text(), fakes)
    np.testing.assert_array_equal(score, fakes["sentiment_model"](counts)["score"])
