"""What is inside the wheel and the sdist, built as a release would build them, and what they are called."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from oriel_wire.distribution import NAME, installed_version

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("wire", "policies", "gateway", "logic", "inference", "cli", "tools")
# `oriel` alone or with an extra, as something to install: the name of another project.
TAKEN = re.compile(
    r"""pip[\s"',]+(?:un)?install\b[^`\n]*?[\s'"]oriel(?![\w./-])"""
    r"|(?<![\w./-])oriel\\?\[(?:\{|cpu|gpu|openvino|tensorrt|demo|embeddings|parquet|tools|redis|s3|gcs|azure|dev)"
    r"""|dependencies\s*=\s*\[[^\]]*["']oriel["'<>=~]"""
)


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


def test_the_wheel_can_draw_the_pages_of_loads(wheel: list[str]) -> None:
    vendor = "oriel_gateway/admin/console/static/vendor"
    assert {"oriel_tools/load/charts.js", f"{vendor}/uplot.js", f"{vendor}/uplot.css"} <= set(wheel)


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


def test_the_distribution_has_a_name_of_its_own(built: Path) -> None:
    assert sorted(path.name.partition("-")[0] for path in built.iterdir()) == ["oriel_serving", "oriel_serving"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == NAME and project["scripts"]["oriel"] == "oriel_cli.main:main"


def test_the_installed_version_is_the_projects() -> None:
    """The version is found under the distribution's name. Only a tree that was never installed has no version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert installed_version() == project["version"]


def texts() -> Iterator[tuple[str, str]]:
    """Yield the name and text of every file in the checkout that somebody reads or copies commands from."""
    folders = (*PACKAGES, "docs", "examples", "requirements", "deploy", "terraform", "tests", "benchmarks", ".ci")
    for path in (*ROOT.glob("*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))):
        own = path == Path(__file__).resolve() or "__pycache__" in path.parts or ".terraform" in path.parts
        if path.is_file() and not own and path.suffix in ("", ".md", ".py", ".sh", ".tf", ".toml", ".txt"):
            yield str(path.relative_to(ROOT)), path.read_text(errors="replace")


def test_nobody_is_sent_to_the_other_project_of_the_name() -> None:
    found = [(name, match[0]) for name, text in texts() for match in TAKEN.finditer(text)]
    assert found == [], "the distribution is oriel-serving"


@pytest.mark.parametrize(
    "text",
    [
        "pip install oriel",
        "`pip install oriel pytest`",
        "uv pip install -U 'oriel>=0.1'",
        "pip uninstall -y onnxruntime && pip install 'oriel[gpu]'",
        "the extra oriel[tensorrt]",
        "f\"pip install 'oriel[{extra}]'\"",
        r"pip install 'oriel\[s3\]'",
        'RUN ["/uv", "pip", "install", "--no-index", "--find-links", "/dist", "oriel"]',
        'dependencies = ["numpy", "oriel"]',
    ],
)
def test_the_other_name_is_seen(text: str) -> None:
    assert TAKEN.search(text)
    assert not TAKEN.search(text.replace("oriel", NAME))


def test_the_make_target_leaves_both_wheels_and_the_sdist_and_prints_how_to_install_them(tmp_path: Path) -> None:
    """Run the target in a copy whose set-up and compilation count as done; files of an earlier version are removed."""
    for name in (*PACKAGES, "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "hatch_build.py", "Makefile"):
        shutil.copy(ROOT / name, tmp_path)
    compiled = f"oriel_serving-{installed_version()}-cp311-cp311-linux_x86_64.whl"
    for name in ("dist/oriel_serving-0.0.9-py3-none-any.whl", f"build/wheels/{compiled}"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    ready = ["HERE=here", f"VENV={sys.prefix}", "-o", "build/wheels/.made-here"]
    command = ["make", "--no-print-directory", "wheel", *ready]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [compiled, f"oriel_serving-{installed_version()}-py3-none-any.whl"]
    wanted = [str(tmp_path / "dist" / each) for each in (*names, f"oriel_serving-{installed_version()}.tar.gz")]
    assert sorted(map(str, (tmp_path / "dist").iterdir())) == wanted
    assert done.stdout.splitlines() == [*wanted, f"pip install '{wanted[0]}[cpu]'"]
