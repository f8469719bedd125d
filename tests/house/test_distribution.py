"""What is inside the wheel and the sdist, built as a release would build them."""

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("wire", "policies", "gateway", "logic", "inference", "cli")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    yield folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> list[str]:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def sdist(built: Path) -> list[str]:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        return [name.partition("/")[2] for name in archive.getnames()]


def sources(folder: str) -> set[str]:
    below = ROOT / folder / f"oriel_{folder}"
    return {str(path.relative_to(ROOT / folder)) for path in below.rglob("*.py")}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_holds_every_module_and_its_types(wheel: list[str], package: str) -> None:
    assert sources(package) <= set(wheel)
    assert f"oriel_{package}/py.typed" in wheel


def test_the_wheel_can_run_the_demo(wheel: list[str]) -> None:
    demo = {name.removeprefix("oriel_cli/_demo/") for name in wheel if name.startswith("oriel_cli/_demo/")}
    assert {
        "policies/tenants.toml",
        "policies/tiers.toml",
        "policies/routes.toml",
        "examples/models_mlp.py",
        "examples/services/digits.py",
        "examples/models/digits/config.pbtxt",
        "examples/models/digits/1/model.onnx",
        "examples/digits/7.png",
        "examples/digits/7.v2.json",
    } <= demo


def test_the_wheel_holds_nothing_else(wheel: list[str]) -> None:
    tops = {name.partition("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {f"oriel_{package}" for package in PACKAGES}
    assert [name for name in wheel if "__pycache__" in name or name.endswith((".pyc", ".env"))] == []
    assert any(name.endswith("/licenses/LICENSE") for name in wheel)


def test_the_sdist_can_be_tested_and_built(sdist: list[str]) -> None:
    needed = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "requirements/dev.txt"}
    assert needed <= set(sdist)
    assert any(name.startswith("tests/") for name in sdist)
    unwanted = (".venv/", ".git/", "build/", ".mypy_cache/", ".oriel/")
    assert [name for name in sdist if name.startswith(unwanted) or "__pycache__" in name] == []
