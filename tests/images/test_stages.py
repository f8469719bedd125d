"""Each image's stages, executed without a container engine, and what they installed, started as an image would be.

What an engine adds (layers, a root of its own) is left out; see docs/images.md. The RUN words, ENV, ENTRYPOINT, CMD
and HEALTHCHECK are the Dockerfiles' own.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
from dockerfile import Dockerfile, parse
from image_stages import Root, RunFailed
from sealed_run import run_sealed

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]  # it compiles

ROOT = Path(__file__).resolve().parents[2]
# name -> unit, target, the stage that installs
TARGETS = {
    "gateway": ("gateway", "gateway", "build"),
    "logic": ("logic", "logic", "build"),
    "inference-cpu": ("inference", "cpu", "build-cpu"),
}
# Hundreds of megabytes and gigabytes: `make test SUITE=images`. TensorRT's own libraries are on no index that tests may
# ask.
if os.environ.get("ORIEL_TEST_IMAGES") == "1":
    TARGETS |= {f"inference-{each}": ("inference", each, f"build-{each}") for each in ("openvino", "gpu")}
# All that pyproject.toml lists takes a minute and a half of CPU to compile, which `make test SUITE=compiled` does. With
# mypyc no class of a compiled module inherits from one of a module that is not, and none of these does.
COMPILED = "wire/oriel_wire/h1/"
GIVEN = {  # what is mounted into each
    "gateway": ("policies/examples", "/etc/oriel/policies"),
    "logic": ("examples/services", "/etc/oriel/services"),
    "inference": ("examples/models", "/models"),
}


def file_of(unit: str) -> Dockerfile:
    return parse((ROOT / unit / "Dockerfile").read_text())


def build(root: Root, *stages: str) -> None:
    try:
        for stage in stages:
            root.build(stage)
    except RunFailed as failed:
        if failed.without_index:
            pytest.skip("neither the package index nor a cache of it is in reach")
        raise


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Return a folder that every user may enter; pytest's own can be entered by one user only."""
    made = Path(tempfile.mkdtemp(prefix="oriel-images-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def context(folder: Path) -> Path:
    """Return a copy of the checkout in which few modules are compiled; all of them for `make test SUITE=images`."""
    if os.environ.get("ORIEL_TEST_IMAGES") == "1":
        return ROOT
    rooms = ("wire", "policies", "gateway", "logic", "inference", "cli", "examples", "requirements")
    for room in rooms:
        shutil.copytree(ROOT / room, folder / "context" / room, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, folder / "context")
    project = folder / "context/pyproject.toml"
    few = [path for path in modules(ROOT) if path.startswith(COMPILED)]
    listed = "".join(f'    "{path}",\n' for path in few)
    text, count = re.subn(r"(?ms)^modules = \[\n.*?^\]", f"modules = [\n{listed}]", project.read_text())
    assert count == 1 and few
    project.write_text(text)
    return folder / "context"


def modules(context: Path) -> list[str]:
    """The paths of the modules that the context's pyproject.toml lists as compiled."""
    build = tomllib.loads((context / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    listed: list[str] = build["targets"]["wheel"]["hooks"]["custom"]["modules"]
    return listed


def compiled_files(context: Path) -> set[str]:
    """The libraries in a compiled wheel: one for each module that is listed, and the one that they share."""
    names = [path.partition("/")[2].removesuffix(".py") for path in modules(context)]
    return {f"{name}{EXTENSION_SUFFIXES[0]}" for name in [*names, "oriel_compiled__mypyc"]}


@pytest.fixture(scope="module")
def wheel(folder: Path, context: Path) -> Path:
    """The stage `wheel`, once: the three Dockerfiles have the same. Its /dist.

    It is compiled without the C compiler's optimisations, which take minutes and change nothing that is tested here.
    """
    root = Root(folder / "wheel", context, file_of("gateway"), build_args={"ORIEL_COMPILE": "debug"})
    build(root, "wheel")
    return root.at("/dist")


@pytest.fixture(scope="module", params=TARGETS)
def image(request: pytest.FixtureRequest, folder: Path, wheel: Path) -> Iterator[tuple[str, Root]]:
    name = request.param
    unit, target, stage = TARGETS[name]
    root = Root(folder / name, ROOT, file_of(unit))
    shutil.copytree(wheel, root.at("/dist"))
    below = [each.name for each in file_of(unit).chain(stage)]
    above = [each.name for each in file_of(unit).chain(target)]
    build(root, *below, *above)
    yield name, root
    shutil.rmtree(root.folder)


def test_the_wheel_of_the_context_is_the_whole_wheel_compiled(wheel: Path, context: Path) -> None:
    """.dockerignore excludes nothing that belongs in the wheel."""
    (built,) = wheel.glob("oriel_serving-*.whl")
    with zipfile.ZipFile(built) as archive:
        names = set(archive.namelist())
    assert "py3-none-any" not in built.name
    assert {name for name in names if name.endswith(".so")} == compiled_files(context)
    for room in ("wire", "policies", "gateway", "logic", "inference", "cli"):
        files = [path for path in (ROOT / room / f"oriel_{room}").rglob("*") if path.is_file()]
        wanted = {str(path.relative_to(ROOT / room)) for path in files if "__pycache__" not in path.parts}
        assert {each for each in wanted if not each.endswith((".so", ".pyc"))} <= names
    assert "oriel_cli/_demo/examples/models/digits/1/model.onnx" in names


def test_an_image_holds_what_its_lock_says(image: tuple[str, Root]) -> None:
    name, root = image
    lock = f"image-{name}.txt"
    uv = Path(sys.executable).with_name("uv")
    python = str(root.at("/opt/oriel/bin/python"))
    done = subprocess.run([uv, "pip", "freeze", "--python", python], capture_output=True, text=True, check=True)
    installed = dict(line.split("==") for line in done.stdout.split() if "==" in line)
    assert installed.pop("oriel-serving") is not None
    pins = dict(re.findall(r"^([a-z0-9._-]+)==([^ ;]+)", (ROOT / "requirements" / lock).read_text(), re.MULTILINE))
    assert set(installed) <= set(pins)
    # Neither what builds nor what installs is in what runs.
    assert not {"pip", "setuptools", "hatchling", "mypy", "uv", "pytest"} & set(installed)


def test_every_module_has_bytecode_that_is_never_looked_after(image: tuple[str, Root]) -> None:
    """A read-only root cannot get bytecode later, and times in bytecode would differ from build to build."""
    _, root = image
    (packages,) = root.at("/opt/oriel/lib").glob("python3.*/site-packages")
    tag = sys.implementation.cache_tag
    missing, checked = [], []
    for room in packages.glob("oriel_*"):
        for source in room.rglob("*.py"):
            compiled = source.parent / "__pycache__" / f"{source.stem}.{tag}.pyc"
            if not compiled.exists():
                missing.append(source)
            elif compiled.read_bytes()[4:8] != b"\x01\x00\x00\x00":  # PEP 552: by hash, not checked
                checked.append(source)
    assert missing == [] and checked == []


def test_nothing_of_the_build_is_written_into_what_is_installed(image: tuple[str, Root]) -> None:
    """Otherwise two builds of one checkout would not give the same files."""
    _, root = image
    infos = list(root.at("/opt/oriel/lib").glob("python3.*/site-packages/*.dist-info/*"))
    assert infos and [path.name for path in infos if path.name in ("direct_url.json", "uv_cache.json")] == []


def test_the_unit_starts_sealed_and_its_own_check_finds_it_alive(image: tuple[str, Root]) -> None:
    name, root = image
    told = run_unit(name, root)
    assert told.get("healthy") is True, told
    assert told["written"] == [str(root.at("/var/lib/oriel"))], "nowhere else, and there it can"
    # In a namespace of its own, whoever runs the tests is 0 and nobody else can be had.
    assert told["user"] == (65532 if os.geteuid() == 0 else 0) and told["code"] == 0, told
    if name.startswith("inference"):
        answer = json.loads(told["answer"]["body"])
        assert told["answer"]["status"] == 200, told
        outputs = {each["name"]: each["data"] for each in answer["outputs"]}
        assert outputs["label"] == [7]


def run_unit(name: str, root: Root) -> dict[str, Any]:
    unit, target, _ = TARGETS[name]
    source, place = GIVEN[unit]
    shutil.copytree(ROOT / source, root.at(place), dirs_exist_ok=True)
    post = None
    if unit == "inference":
        post = ("/v2/models/digits/infer", 8000, (ROOT / "examples/digits/7.v2.json").read_text())
    return run_sealed(root, file_of(unit), target, post)


@pytest.mark.parametrize(
    ("lock", "python"),
    [
        *((f"image-{unit}", python) for unit in ("gateway", "logic") for python in ("3.11", "3.14")),
        *((f"image-inference-{each}", python) for each in ("cpu", "gpu", "tensorrt") for python in ("3.11", "3.14")),
        *(("image-inference-openvino", python) for python in ("3.11", "3.13")),
        *((f"image-extra-{each}", "3.11") for each in ("forests", "openvino-models")),
        *(("dev", python) for python in ("3.12", "3.13", "3.14")),
        ("stores", "3.14"),
    ],
)
def test_every_target_can_be_installed_as_locked(lock: str, python: str, tmp_path: Path) -> None:
    """Every package has a wheel for glibc 2.28, and its hash is in the lock; nothing is downloaded."""
    uv, file = Path(sys.executable).with_name("uv"), ROOT / "requirements" / f"{lock}.txt"
    words = [uv, "pip", "install", "--dry-run", "--no-config", "--require-hashes", "--only-binary", ":all:"]
    words += ["--target", tmp_path, "--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    done = subprocess.run([*words, "-r", file], cwd=tmp_path, capture_output=True, text=True, check=False)
    if RunFailed(done.stderr).without_index:
        pytest.skip("neither the package index nor a cache of it is in reach")
    assert done.returncode == 0 and "Would install" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("sha256", "bindings"), [("unchecked", "unchecked"), ("ab" * 32, "unchecked"), ("ab" * 32, "cd" * 32)]
)
def test_tensorrt_is_asked_for_by_its_arguments(sha256: str, bindings: str, tmp_path: Path) -> None:
    """TensorRT's own index cannot be reached here, so a program that records its arguments stands for uv."""
    uv = tmp_path / "uv"
    uv.write_text("#!/usr/bin/env python3\nimport sys, pathlib\nfile = pathlib.Path(sys.argv[0] + '.calls')\n")
    with uv.open("a") as out:
        out.write("file.open('a').write(' '.join(sys.argv[1:]) + chr(10))\n")
    uv.chmod(0o755)
    given = {"TENSORRT_SHA256": sha256, "TENSORRT_BINDINGS_SHA256": bindings}
    arguments = {"TENSORRT_VERSION": "10.16.0.72", **{name: value for name, value in given.items() if value}}
    root = Root(tmp_path / "root", ROOT, file_of("inference"), build_args=arguments, uv=uv)
    for made in ("/opt/oriel/bin", "/src", "/dist"):
        root.at(made).mkdir(parents=True)
    root.at("/opt/oriel/bin/python").symlink_to(sys.executable)
    root.at("/uv").symlink_to(uv)
    root.build("build-tensorrt")
    pinned = root.at("/src/tensorrt.txt").read_text()
    assert pinned.splitlines() == [
        f"tensorrt-cu13-{part}==10.16.0.72" + ("" if value == "unchecked" else f" --hash=sha256:{value}")
        for part, value in (("libs", sha256), ("bindings", bindings))
    ]
    (call,) = [line for line in Path(f"{root.at('/uv')}.calls").read_text().splitlines() if " tensorrt.txt" in line]
    assert call.endswith("--no-deps --only-binary :all: --default-index https://pypi.nvidia.com -r tensorrt.txt")
    linked = root.at("/opt/oriel/tensorrt").readlink()
    # Debian's own Python has another folder than an environment made with it.
    assert (linked.parent.name, linked.name) in (("site-packages", "tensorrt_libs"), ("dist-packages", "tensorrt_libs"))
    # Where the loader is told to look.
    assert root.environment("tensorrt")["LD_LIBRARY_PATH"] == str(root.at("/opt/oriel/tensorrt"))


def test_an_image_runs_the_compiled_build(image: tuple[str, Root]) -> None:
    _, root = image
    told = subprocess.run([root.at("/opt/oriel/bin/oriel"), "version"], capture_output=True, text=True, check=True)
    assert told.stdout.endswith(" (compiled)\n")


def test_a_pure_wheel_is_a_build_argument(folder: Path) -> None:
    """A base whose Python has no image with a C compiler needs the pure wheel."""
    root = Root(folder / "pure", ROOT, file_of("gateway"), build_args={"ORIEL_COMPILE": "0"})
    build(root, "wheel")
    assert [path.name.partition("-py3")[2] for path in root.at("/dist").glob("*.whl")] == ["-none-any.whl"]
