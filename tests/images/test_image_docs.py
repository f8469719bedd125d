"""docs/images.md and docs/deploy.md say what the locks, the Dockerfiles, Terraform's files and the commands say."""

import argparse
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dockerfile import parse
from packaging.requirements import Requirement

from oriel_cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
IMAGES = (ROOT / "docs" / "images.md").read_text()
DEPLOY = (ROOT / "docs" / "deploy.md").read_text()
UNITS = ("gateway", "logic", "inference")
CLOUDS = ("aws", "gcp", "azure")
SHARED_OUTPUTS = {
    *("cloud", "cluster_name", "cluster_endpoint", "cluster_ca_certificate", "cluster_auth", "registry_url"),
    *("model_repository_url", "redis_url", "redis_tls", "redis_auth_secret_ref", "workload_identity"),
    *("gpu_node_selector", "gpu_taint", "storage_class"),
}


def table(text: str, mark: str) -> list[list[str]]:
    """The rows, head first, of the table below <!-- mark -->, backquotes and stars taken off."""
    lines = text.partition(f"<!-- {mark} -->\n")[2].partition("\n\n")[0].splitlines()
    rows = [[cell.strip().strip("*`") for cell in line.strip("|").split("|")] for line in lines if line[:2] != "|-"]
    return rows


def commands(text: str) -> list[str]:
    """The lines of every shell block, continued ones joined, comments off."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s{2,}#.*", "", line).strip() for line in lines if line.strip()]


def declared(kind: str, folder: str) -> set[str]:
    files = sorted((ROOT / "terraform" / folder).glob("*.tf"))
    assert files
    return set(re.findall(rf'^{kind} "(\w+)"', "\n".join(path.read_text() for path in files), re.MULTILINE))


def pin(lock: str, package: str) -> str:
    found = re.search(rf"^{package}==([^ ;]+)", (ROOT / "requirements" / lock).read_text(), re.MULTILINE)
    return found[1] if found else ""


def test_each_secret_that_the_platform_can_name_has_its_command_and_its_name_in_the_inputs() -> None:
    """Given before the first apply, in a namespace made by hand: pods that name a Secret wait for it."""
    part = DEPLOY.partition("### Secrets: ")[2].partition("\n### ")[0]
    first, *made = commands(part)
    assert first == "kubectl create namespace oriel"
    names = {shlex.split(line)[6] for line in made}
    rows = {
        cells[1].partition(":")[0].strip(" `"): cells[2]
        for cells in (r.split("|") for r in part.splitlines())
        if len(cells) > 3
    }
    assert names == set(rows) - {"Secret", "---"}
    told = " ".join(rows.values())
    variables = (ROOT / "terraform/modules/platform/variables.tf").read_text()
    inputs = set(re.findall(r"\b(tls_secret|credentials|\w+_secret_ref|pull_secret)\s+= optional", variables))
    inputs = {each.removeprefix("redis_") for each in inputs}  # terraform/local's redis.auth_secret_ref
    assert len(inputs) == 7 and all(f"{each} = " in told for each in inputs)
    for name, key in re.findall(r'name = "(\w+)", key = "(\w+)"', told):
        assert any(f" {name} --from-literal={key}=" in line for line in made), name


def test_what_each_tag_carries_is_what_its_lock_pins() -> None:
    _, *rows = table(IMAGES, "carries")
    trt = re.search(r"^ARG TENSORRT_VERSION=(\S+)", (ROOT / "inference/Dockerfile").read_text(), re.MULTILINE)
    assert trt is not None
    engines = {"cpu": "onnxruntime", "openvino": "onnxruntime-openvino"}
    written = {}
    for target in parse((ROOT / "inference/Dockerfile").read_text()).targets:
        lock, engine = f"image-inference-{target}.txt", engines.get(target, "onnxruntime-gpu")
        nvidia = [pin(lock, f"nvidia-{each}") for each in ("cuda-runtime", "cublas", "cudnn-cu13")]
        written[target] = [f"{engine} {pin(lock, engine)}", *nvidia, trt[1] if target == "tensorrt" else ""]
    assert {name: cells for name, *cells in rows} == written


def test_the_image_with_tensorrt_has_what_plans_need() -> None:
    wanted = [line for line in (ROOT / "requirements/image-tensorrt.in").read_text().splitlines() if line[:1] != "#"]
    for requirement in map(Requirement, wanted):
        version = pin("image-inference-tensorrt.txt", requirement.name)
        assert version and requirement.specifier.contains(version), f"{requirement}: run 'make lock'"
    target = parse((ROOT / "inference/Dockerfile").read_text()).chain("tensorrt")[-1]
    (check,) = [each.words[-1] for each in target.each("RUN") if each.words is not None]
    assert "cuda.bindings.runtime" in check, "a base that lacks a library fails the build"


def test_every_build_argument_is_in_the_table_with_its_default() -> None:
    defaults: dict[str, str] = {}
    for unit in UNITS:
        file = parse((ROOT / unit / "Dockerfile").read_text())
        for each in (i for stage in file.stages for i in stage.each("ARG")):
            if each.argument not in file.arguments:
                defaults[each.argument] = each.text.partition("=")[2]
        defaults |= file.arguments
    _, *rows = table(IMAGES, "arguments")
    told: dict[str, str] = {}
    for names, values, _ in rows:
        split = [each.strip(" `") for each in names.split(",")]
        told |= dict(zip(split, [each.strip(" `") for each in values.split(",")], strict=True))
    assert told == defaults


@pytest.mark.parametrize("page", [IMAGES, DEPLOY], ids=["images", "deploy"])
def test_it_is_said_plainly_what_never_happened(page: str) -> None:
    assert "never to a cloud" in page or "Never with Docker" in page


def test_the_outputs_are_explained_each_once() -> None:
    section = DEPLOY.partition("## 4. What each output is for")[2].partition("## 5")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == sorted(SHARED_OUTPUTS)


@pytest.mark.parametrize("folder", [*CLOUDS, "local"])
def test_outputs_that_commands_ask_for_exist(folder: str) -> None:
    assert declared("output", folder) == SHARED_OUTPUTS
    asked = set(re.findall(r"output -raw (\w+)", DEPLOY))
    assert asked and asked <= SHARED_OUTPUTS


@pytest.mark.parametrize("folder", [*CLOUDS, "local"])
def test_variables_that_commands_set_exist(folder: str) -> None:
    known = declared("variable", folder)
    mine = [
        line for line in commands(DEPLOY) if "terraform -chdir" in line and ("local" in line) == (folder == "local")
    ]
    assert mine
    assert {name for line in mine for name in re.findall(r"-var '?(\w+)=", line)} <= known


def test_the_variables_file_has_known_names() -> None:
    block = re.findall(r"```hcl\n(.*?)```", DEPLOY, re.DOTALL)[0]
    names = set(re.findall(r"^(\w+) *=", block, re.MULTILINE))
    assert {"region", "cluster", "platform"} <= names <= declared("variable", "aws")


def test_the_variables_file_is_taken_by_terraform(tmp_path: Path) -> None:
    """Types and validations, by the real binary, of the roots' own files: no provider is needed for that."""
    terraform = shutil.which("terraform")
    if terraform is None:
        pytest.skip("terraform is not on PATH")
    for name in ("variables", "names"):
        shutil.copy(ROOT / f"terraform/modules/roots/{name}.tf", tmp_path)
    block = re.findall(r"```hcl\n(.*?)```", DEPLOY, re.DOTALL)[0]
    (tmp_path / "oriel.auto.tfvars").write_text(block)
    for words in (["init"], ["plan", "-detailed-exitcode"]):
        done = subprocess.run(
            [terraform, *words, "-no-color"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_sizes_whose_prices_are_told_are_the_defaults() -> None:
    head, *rows = table(DEPLOY, "costs")
    for column, cloud in enumerate(CLOUDS, 1):
        assert head[column].startswith(cloud)
        files = "\n".join(path.read_text() for path in (ROOT / "terraform" / cloud).glob("*.tf"))
        named = [row[column].partition(":")[0] for row in rows if re.match(r"[A-Za-z]", row[column])]
        assert len(named) >= 3 and [each for each in named if f'"{each}"' not in files] == []


def test_the_sums_of_the_table_are_right() -> None:
    _, *rows = table(DEPLOY, "costs")
    upto = [row[0] for row in rows].index("always")
    for column in range(1, 4):
        parts = [int(re.findall(r"(\d+)(?: \(.*\))?$", row[column])[0]) for row in rows[:upto]]
        assert sum(parts) == int(rows[upto][column].strip("* "))


def flags(name: str) -> set[str]:
    """Those a command takes, its actions' among them."""
    parser = argparse.ArgumentParser()
    importlib.import_module(COMMANDS[name].module).add_arguments(parser)
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {flag for each in action.choices.values() for flag in each._option_string_actions}
    return found


@pytest.mark.parametrize("page", [IMAGES, DEPLOY], ids=["images", "deploy"])
def test_commands_of_ours_are_written_as_they_are(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    inline = re.findall(r"`((?:oriel|make) [^`]+)`", page)
    ours = [line for line in commands(page) + inline if line.startswith(("oriel ", "make "))]
    assert ours
    for line in ours:
        program, name, *words = shlex.split(line)
        if program == "make":
            assert name in targets, line
        else:
            name = f"{name} {words[0]}" if words and f"{name} {words[0]}" in COMMANDS else name
            assert {word.partition("=")[0] for word in words if word.startswith("--")} <= flags(name), line


@pytest.mark.parametrize("unit", UNITS)
def test_an_image_starts_as_the_page_says(unit: str) -> None:
    file = parse((ROOT / unit / "Dockerfile").read_text())
    chain = [each for stage in file.chain(file.targets[-1]) for each in stage.instructions]
    words = {each.name: each.words or () for each in chain if each.words is not None}
    assert f"`oriel {unit} {' '.join(words['CMD'])}`" in IMAGES
    assert {word for word in words["CMD"] if word.startswith("--")} <= flags(unit)


ENGINE = """#!{python}
import json, os, sys
words = sys.argv[1:]
with open({calls!r}, "a") as calls:
    calls.write(json.dumps([*words, os.environ["BUILDAH_FORMAT"]]) + chr(10))
if "--digestfile" in words:
    open(words[words.index("--digestfile") + 1], "w").write("sha256:" + str(len(words[-1])))
if words[0] == "inspect":
    print("r.example/o/x@sha256:" + str(len(words[-1])))
"""


def make_images(tmp_path: Path, engine: str, *more: str) -> list[list[str]]:
    """Run `make images` for two targets with an engine that only writes down how it is called; return its calls."""
    program, calls = tmp_path / engine, tmp_path / "calls"
    program.write_text(ENGINE.format(python=sys.executable, calls=str(calls)))
    program.chmod(0o755)
    calls.unlink(missing_ok=True)
    words = ["REGISTRY=r.example/o", "TAG=1.2", "TARGETS=cpu tensorrt", f"ENGINE={program}", f"RECORDS={tmp_path}/out"]
    command = ["make", "--no-print-directory", "images", *words, *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in calls.read_text().splitlines()]


TAGS = ["oriel-gateway:1.2", "oriel-logic:1.2", "oriel-inference:1.2-cpu", "oriel-inference:1.2-tensorrt"]


def test_make_builds_every_image_by_its_name(tmp_path: Path) -> None:
    calls = make_images(tmp_path, "engine")
    # Podman's and buildah's own format has no room for HEALTHCHECK: they leave it out with a warning.
    assert {call.pop() for call in calls} == {"docker"}
    assert {call[0] for call in calls} == {"build"}
    assert [call[call.index("-t") + 1] for call in calls] == [f"r.example/o/{tag}" for tag in TAGS]
    assert [call[call.index("--target") + 1] for call in calls if "--target" in call] == ["cpu", "tensorrt"]
    assert all((ROOT / call[call.index("-f") + 1]).is_file() and "VERSION=1.2" in call for call in calls)


@pytest.mark.parametrize("engine", ["docker", "podman", "buildah"])
def test_make_records_the_digest_and_the_contents_of_every_image(engine: str, tmp_path: Path) -> None:
    calls = make_images(tmp_path, engine, "PUSH=1", "SBOM=1", "SYFT=echo")
    names = [f"r.example/o/{tag}" for tag in TAGS]
    files = [f"{tmp_path}/out/{tag.replace(':', '-')}.tar" for tag in TAGS]
    read = [["save", "-o", file, name] for file, name in zip(files, names, strict=True)]
    if engine == "buildah":
        read = [["push", "-q", name, f"docker-archive:{file}"] for _, _, file, name in read]
    assert [call[:4] for call in calls if call[1] in ("-q", "-o")] == read
    assert [call[-2] for call in calls if call[0] == "push" and call[1] != "-q"] == names
    written = (tmp_path / "out" / "digests.txt").read_text().splitlines()
    assert written == [f"{name}@sha256:{len(name)}" for name in names]


def test_make_images_asks_for_the_registry() -> None:
    done = subprocess.run(["make", "images"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "pass REGISTRY=" in done.stderr
