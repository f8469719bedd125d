"""`oriel engines`: artefacts without a server."""

import json
import shutil
from pathlib import Path

import pytest
from memory_objects import MemoryObjects, MemoryWriter

from oriel_cli.main import main
from oriel_cli.models import engines
from oriel_inference.backends.onnx_graph import ENTRY

from ..inference.artefact_server import built_ahead, forge
from ..inference.control_server import put, times
from ..inference.models import DOUBLE
from ..inference.models import put as models_put

COMPILED = DOUBLE + 'parameters { key: "oriel.compile" value { string_value: "onnxruntime-graph" } }\n'


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an artefact of `double`."""
    root = tmp_path_factory.mktemp("built")
    put(root / "models", 2.0, config=COMPILED)
    return built_ahead(root / "models", root / "a")


def test_artefacts_are_built_listed_verified_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    repository, folder = ["--model-repository", str(tmp_path / "models")], ["--artefact-folder", str(tmp_path / "a")]

    def run(*words: str, code: int = 0) -> str:
        assert main(["engines", *words, *folder]) == code
        return capsys.readouterr().out

    built = run("build", *repository)
    assert built.startswith("double/1: built ")
    (line,) = json.loads(run("build", *repository, "--json"))
    assert line["state"] == "found" and line["reason"].startswith("largest error 0 absolute")
    fingerprint = line["fingerprint"]
    heading, row = run("ls").splitlines()
    assert heading.split() == ["FINGERPRINT", "MODEL", "COMPILER", "BYTES", "AGE", "STATE", "REASON"]
    assert row.startswith(f"{fingerprint[:12]}  double/1  onnxruntime-graph")
    (listed,) = json.loads(run("ls", "--json"))
    assert listed["fingerprint"] == fingerprint and listed["key"]["compiler"] == "onnxruntime-graph"
    assert run("verify") == (
        f"{fingerprint[:12]}: whole, its files have their checksums; "
        "to compare its outputs with those of its model, give --model-repository\n"
    )
    assert run("verify", *repository) == (
        f"{fingerprint[:12]}: agrees, with double/1: largest error 0 absolute, 0 relative over 2 samples; "
        "tolerance FP32 1e-05 absolute + 0.001 relative\n"
    )
    with (tmp_path / "a" / fingerprint / "optimised.onnx").open("ab") as file:
        file.write(b"x")
    assert run("verify", code=1) == (
        f"{fingerprint[:12]}: damaged, optimised.onnx is not the file that was built; "
        "a server that needs it removes it and builds it again\n"
    )
    assert run("rm", fingerprint[:8]) == f"{fingerprint[:12]} is removed\n"
    assert run("ls") == "no artefacts\n"


def test_verify_names_the_artefact_that_disagrees_the_tolerance_and_what_to_do(
    tmp_path: Path, built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It named the model in place of the artefact, which was called whole in another line."""
    put(tmp_path / "models", 2.0, config=COMPILED)
    repository, folder = ["--model-repository", str(tmp_path / "models")], ["--artefact-folder", str(tmp_path / "a")]
    verify = ["engines", "verify", *repository, *folder]
    (tmp_path / "a").mkdir(mode=0o700)
    assert main(verify) == 0
    assert ": absent, there is no artefact of double/1 for this machine; `oriel engines build`" in (
        capsys.readouterr().out
    )
    artefact = shutil.copytree(built, tmp_path / "a" / built.name)
    forge(artefact, ENTRY, times(5.0).SerializeToString())
    capsys.readouterr()
    assert main(verify) == 1
    (text,) = capsys.readouterr().out.splitlines()
    assert text.startswith(f"{artefact.name[:12]}: disagrees, with double/1: output 'y' differs in 20 of 20 elements")
    assert text.endswith(
        ", 1.5 relative; tolerance FP32 1e-05 absolute + 0.001 relative; no server uses it: remove it with `oriel "
        "engines rm`, or allow larger errors with the parameter oriel.compile.tolerance"
    )
    assert main([*verify, "--artefact-build-memory", "1000000", "--json"]) == 1
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["fingerprint"], line["state"]) == (artefact.name, "failed")
    assert line["advice"] == "give a larger --artefact-build-memory"


def test_verify_has_a_line_for_each_model_of_an_artefact(
    tmp_path: Path, built: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two models with the same file share an artefact, and may allow different errors."""
    root, folder = tmp_path / "models", ["--artefact-folder", str(tmp_path / "a")]
    own = 'parameters { key: "oriel.compile.tolerance" value { string_value: "relative=9" } }'
    put(root, 2.0, config=COMPILED)
    models_put(root, "lenient", times(2.0), COMPILED.replace('name: "double"', 'name: "lenient"') + own)
    shutil.copytree(built.parent, tmp_path / "a")
    forge(tmp_path / "a" / built.name, ENTRY, times(5.0).SerializeToString())
    assert main(["engines", "verify", "--model-repository", str(root), *folder, "--json"]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert first["fingerprint"] == second["fingerprint"]
    assert {first["state"], second["state"]} == {"agrees", "disagrees"}


def test_a_refused_build_ends_with_1_and_is_listed_until_it_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    repository, folder = ["--model-repository", str(tmp_path / "models")], ["--artefact-folder", str(tmp_path / "a")]
    small = ["--artefact-build-memory", "1000000"]
    assert main(["engines", "build", *repository, *folder, *small, "--json"]) == 1
    (line,) = json.loads(capsys.readouterr().out)
    assert line["state"] == "refused" and "bytes of address space, of 1000000 that it may take" in line["reason"]
    assert main(["engines", "ls", *folder, "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["state"] == "refused" and listed["model"] == "double"
    assert main(["engines", "rm", "--refused", *folder]) == 0
    assert main(["engines", "build", *repository, *folder]) == 0
    assert "double/1: built" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["rm"], "say which artefacts to remove: fingerprints, --refused or --all"),
        (["rm", "abc"], "give at least 6 characters"),
        (["verify", "abcdef"], "there is none"),
        (["build", "--model-repository", "/nowhere"], "is not a folder"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    assert main(["engines", *words, "--artefact-folder", str(tmp_path / "a")]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and reason in captured.err


def test_a_model_that_asks_for_no_artefact_is_named_if_it_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path / "models", 2.0)
    folder = ["--artefact-folder", str(tmp_path / "a"), "--model-repository", str(tmp_path / "models")]
    assert main(["engines", "build", *folder]) == 0
    assert capsys.readouterr().out == "no model asks for an artefact\n"
    assert main(["engines", "build", "double", *folder]) == 1
    assert capsys.readouterr().out == "double/1: failed, its configuration has no parameters['oriel.compile']\n"


def test_a_build_for_devices_builds_what_this_machine_can_and_says_what_the_others_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    folder = ["--artefact-folder", str(tmp_path / "a"), "--model-repository", str(tmp_path / "models")]
    assert main(["engines", "build", *folder, "--for", "nvidia-l4,a100"]) == 1
    for line, (name, capability) in zip(
        capsys.readouterr().out.splitlines(), (("nvidia-l4", "8.9"), ("a100", "8.0")), strict=True
    ):
        assert line == (
            f"double/1 for {name}: elsewhere, onnxruntime-graph builds for the CPU of this machine: it takes a "
            f"compiler for GPUs, on a machine with a GPU of compute capability {capability}, as {name} has it"
        )
    assert not (tmp_path / "a").exists() or not list((tmp_path / "a").iterdir()), "nothing was built"
    assert main(["engines", "build", *folder, "--for", "cpu,l4", "--json"]) == 1
    elsewhere, built = json.loads(capsys.readouterr().out)
    assert (elsewhere["for"], elsewhere["state"], built["state"]) == ("l4", "elsewhere", "built")
    assert main(["engines", "build", *folder, "--for", "cpu"]) == 0
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["engines", "build", *folder, "--for", "tpu"])
    assert "'tpu' is not a known device" in capsys.readouterr().err


def test_artefacts_travel_through_an_object_store(
    tmp_path: Path, built: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = MemoryObjects()

    monkeypatch.setattr(engines, "open_client", lambda location: objects)
    monkeypatch.setattr(engines, "open_writer", lambda location: MemoryWriter(objects))
    put(tmp_path / "models", 2.0, config=COMPILED)
    repository, url = ["--model-repository", str(tmp_path / "models")], "s3://bucket/engines"
    one, other = (["--artefact-folder", str(tmp_path / name)] for name in ("one", "other"))
    shutil.copytree(built.parent, tmp_path / "one")
    assert main(["engines", "push", url, *one, "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert (line["state"], line["model"]) == ("pushed", "double")
    assert all(key.startswith(f"engines/{line['fingerprint']}/") for key in objects.objects)
    assert main(["engines", "pull", url, *other]) == 0
    assert capsys.readouterr().out == f"{line['fingerprint'][:12]}: pulled\n"
    assert main(["engines", "build", *repository, *other]) == 0
    assert "double/1: found" in capsys.readouterr().out
    assert main(["engines", "pull", "ftp://bucket", *other]) == 1
    assert "'ftp' is not a known object store" in capsys.readouterr().err
