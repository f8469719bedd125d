"""`oriel models check`: the verdict on each folder of a repository, from what a server's start would say."""

import json
from pathlib import Path
from typing import Any

import pytest
from memory_objects import MemoryObjects

from oriel_cli.main import main

from ..inference import models

TENSORS = 'input { name: "x" data_type: TYPE_FP32 dims: 4 }\noutput { name: "y" data_type: TYPE_FP32 dims: 4 }\n'
STEP = """platform: "ensemble" max_batch_size: 4
ensemble_scheduling { step { model_name: "%s" model_version: -1
input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }
"""


def unnamed(more: str = "") -> str:
    return models.DOUBLE.replace('name: "double"', "", 1) + more


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    models.put(root, "good", models.double(), None)
    tuned = "optimization { priority: PRIORITY_MAX } response_cache { enable: true }"
    models.put(root, "tuned", models.double(), unnamed(tuned))
    models.put(root, "older", models.double(), unnamed())
    models.put(root, "older", None, None, version=2)
    (root / "older/2/model.onnx").write_bytes(b"not a model")
    models.put(root, "gpu", models.double(), unnamed("instance_group { kind: KIND_GPU }"))
    models.put(root, "caffe", None, 'platform: "caffe2_netdef"')
    (root / "caffe/1/model.netdef").write_bytes(b"not read")
    models.put(root, "lost", None, None)
    models.put(root, "steps", None, STEP % "good" + TENSORS)
    models.put(root, "broken_steps", None, STEP % "caffe" + TENSORS)
    models.put(root, "ring", None, STEP % "ring" + TENSORS)
    folder = models.put(root, "code", None, 'backend: "python"\n' + TENSORS)
    (folder / "1/model.py").write_text(f"open({str(root.parent / 'ran')!r}, 'w')\nclass TritonPythonModel: pass\n")
    return root


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["models", "check", "--json", *words]) == 1, "some folders are refused"
    said = capsys.readouterr()
    assert said.err.endswith("models would not serve here: see docs/from-triton.md\n")
    return {each["model"]: each for each in json.loads(said.out)}


def test_each_folder_has_the_verdict_of_a_start(
    repository: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    found = checked(capsys, str(repository))
    assert "response_cache has no effect" not in caplog.text
    assert sorted(found) == sorted(path.name for path in repository.iterdir())
    assert {name: each["verdict"] for name, each in found.items()} == {
        "good": "loads",
        "steps": "loads",
        "tuned": "loads with differences",
        "older": "loads with differences",
        **dict.fromkeys(("gpu", "caffe", "lost", "broken_steps", "ring", "code"), "refused"),
    }
    assert found["good"] == {**found["good"], "versions": [1], "runs_on": "CPU", "notes": []}
    assert found["tuned"]["notes"] == ["optimization.priority has no effect here"]
    assert found["older"]["versions"] == [1] and "version 2: older/2/model.onnx" in found["older"]["notes"][0]
    ways_out = {"gpu": "docs/gpus.md", "caffe": "docs/convert-to-onnx.md", "lost": "docs/model-repository.md"}
    assert {name: path for name, path in ways_out.items() if path not in found[name]["notes"][0]} == {}
    assert "'caffe', which is not ready" in found["broken_steps"]["notes"][0]
    assert "the model's code failed" in found["code"]["notes"][0] and (repository.parent / "ran").exists()


def test_files_alone_are_judged_without_engines_or_code(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("oriel_inference.backends.import_module", missing)
    ran = repository.parent / "ran"
    ran.unlink(missing_ok=True)
    found = checked(capsys, str(repository), "--no-open")
    refused = {name for name, each in found.items() if each["verdict"] == "refused"}
    assert refused == {"caffe", "lost", "broken_steps", "ring"}, "the machine that serves may have GPUs"
    assert found["older"]["versions"] == [1] and "not a whole ONNX file" in found["older"]["notes"][0]
    assert found["broken_steps"]["notes"] == ["needs model 'caffe', which is refused: see its own line"]
    assert not any(each["runs_on"] for each in found.values()) and not ran.exists()


@pytest.mark.parametrize(("backend", "page"), [("fil", "docs/forests.md"), ("openvino", "docs/openvino-models.md")])
def test_no_machine_has_gpus_for_an_engine_of_cpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str, page: str
) -> None:
    models.put(tmp_path, "net", None, f'backend: "{backend}" instance_group {{ kind: KIND_GPU }}')
    (note,) = checked(capsys, str(tmp_path), "--no-open")["net"]["notes"]
    assert "instance_group[0].kind" in note and page in note


def test_a_good_repository_ends_with_0_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.put(tmp_path, "good", models.double(), None)
    assert main(["models", "check", str(tmp_path)]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["MODEL", "VERDICT"] and line.split() == ["good", "loads", "CPU"]


@pytest.mark.parametrize("opens", [[], ["--no-open"]])
def test_a_bucket_is_judged_as_a_server_would_and_its_code_does_not_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, opens: list[str]
) -> None:
    files = {
        "r/good/1/model.onnx": models.double().SerializeToString(),
        "r/code/config.pbtxt": f'backend: "python"\n{TENSORS}'.encode(),
        "r/code/1/model.py": b"raise SystemExit",
    }
    monkeypatch.setattr("oriel_inference.stores.opening.open_client", lambda location: MemoryObjects(files))
    found = checked(capsys, "s3://bucket/r", *opens)
    assert {name: each["verdict"] for name, each in found.items()} == {"good": "loads", "code": "refused"}
    assert "Python models run only from a folder of this machine" in found["code"]["notes"][0]


@pytest.mark.parametrize("opens", [[], ["--no-open"]])
def test_a_name_in_two_repositories_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], opens: list[str]
) -> None:
    for name in ("one", "two"):
        models.put(tmp_path / name, "good", models.double(), None)
    found = checked(capsys, str(tmp_path / "one"), str(tmp_path / "two"), *opens)
    assert found["good"]["verdict"] == "refused" and "more than one model repository" in found["good"]["notes"][0]


def test_a_repository_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "check", str(tmp_path / "nothing")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "'" + str(tmp_path / "nothing") in said.err
