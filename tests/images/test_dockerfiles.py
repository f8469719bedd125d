"""The Dockerfiles, judged without a container engine: hadolint, and the rules it does not know."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from dockerfile import parse
from dockerfile_rules import faults
from dockerignore import Ignore

ROOT = Path(__file__).resolve().parents[2]
UNITS = ("gateway", "logic", "inference")
MAX_CONTEXT_BYTES = 8 << 20


def text_of(unit: str) -> str:
    return (ROOT / unit / "Dockerfile").read_text()


def pinned(lock: str, package: str) -> str:
    (found,) = set(re.findall(rf"^{package}==(\S+)", (ROOT / "requirements" / lock).read_text(), re.MULTILINE))
    return str(found)


@pytest.mark.parametrize("unit", UNITS)
def test_hadolint_finds_nothing(unit: str) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (its wheel is for Linux on x86-64)")
    command = [hadolint, "--config", str(ROOT / ".hadolint.yaml"), "--failure-threshold", "info", f"{unit}/Dockerfile"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("unit", UNITS)
def test_our_own_rules_hold(unit: str) -> None:
    assert faults(parse(text_of(unit)), unit, ROOT) == []


def test_every_target_is_there() -> None:
    targets = {unit: parse(text_of(unit)).targets for unit in UNITS}
    assert targets["gateway"] == ["gateway"] and targets["logic"] == ["logic"]
    # The last is what is built where no target is named: the one without gigabytes of CUDA.
    assert sorted(targets["inference"]) == ["cpu", "gpu", "openvino", "tensorrt"]
    assert parse(text_of("inference")).names[-1] == "cpu"


MUTATIONS = [
    ("FROM ${BASE_IMAGE} AS gateway", "FROM python:3.13 AS gateway", "neither a build argument nor"),
    ("ARG BASE_IMAGE=docker.io/library/python:3.11-slim-bookworm", "ARG BASE_IMAGE=python:latest", "names no version"),
    ("USER 65532:65532", "USER root", "does not run as"),
    ("USER 65532:65532\nWORKDIR", "USER 65532:65532\nCOPY LICENSE /LICENSE\nWORKDIR", "makes files after USER"),
    ('RUN ["/uv", "venv", "/tools"]', "RUN /uv venv /tools", "shell form"),
    ('RUN ["/uv", "venv", "/tools"]', 'RUN ["/bin/sh", "-c", "/uv venv /tools"]', "a base need not have"),
    ('RUN ["/uv", "venv", "/tools"]', 'RUN ["python3", "-m", "venv", "/tools"]', "looks python3 up"),
    ('"--require-hashes", "--only-binary"', '"--only-binary"', "no hash pins"),
    ("from os import makedirs;", "import os; os.execv('/uv', ['/uv', 'pip', 'install', 'x']);", "no hash pins"),
    ('"--no-index", "--find-links", "/dist", "oriel-serving"]', '"oriel-serving"]', "no lock pins"),
    ("ENTRYPOINT [", "ENTRYPOINT oriel gateway #[", "shell form"),
    ('ENTRYPOINT ["/opt/oriel/bin/oriel", "gateway"]', 'ENTRYPOINT ["/opt/oriel/bin/oriel", "logic"]', "not start"),
    ("'127.0.0.1', 8082,", "'127.0.0.1', 9999,", "asks no health"),
    ("EXPOSE 8080 8081 8082 8083", "EXPOSE 8080", "does not expose 8082"),
    ("COPY cli cli", "COPY cli/oriel_climb cli", "there is no cli/oriel_climb"),
    ("COPY cli cli", "COPY tests tests", ".dockerignore keeps tests out"),
    ("COPY cli cli", "COPY . .", "whole context"),
    ("COPY cli cli", "ADD cli cli", "ADD is not used"),
    ("--from=wheel", "--from=weel", "no earlier stage"),
    ("ARG ORIEL_COMPILE=1", "ARG ORIEL_KOMPILE=1", "used by nothing"),
    ("ARG REVISION=unknown\n", "", "declared nowhere"),
    ("ARG SOURCE=unknown", "ARG SOURCE=unknown\nARG NPM_TOKEN=abc", "may carry a secret"),
    ("UV_NO_CACHE=1", "UV_NO_CACHE=1 UV_INDEX=https://me:pw@index.example/simple", "may carry a secret"),
    ('org.opencontainers.image.revision="${REVISION}"', 'a.b="${REVISION}"', "lacks the label"),
    ("--chown=65532:65532 /state /var/lib/oriel", "--chown=65532:65532 /state /opt", "more to write"),
    ("/state/cache", "/etc/cache", "which is not ours"),
]


@pytest.mark.parametrize(("old", "new", "said"), MUTATIONS, ids=lambda value: value[:30])
def test_a_rule_that_is_broken_is_named(old: str, new: str, said: str) -> None:
    assert old in text_of("gateway"), "the mutation changes nothing"
    found = faults(parse(text_of("gateway").replace(old, new)), "gateway", ROOT)
    assert any(said in fault for fault in found), found


def test_the_three_are_one_up_to_what_they_install() -> None:
    shared = [text_of(unit).partition("ARG BASE_IMAGE")[2].partition("COPY requirements/image-g")[0] for unit in UNITS]
    until = "COPY --from=wheel /dist /dist\n"
    heads = {each.partition(until)[0] for each in shared}
    assert len(heads) == 1 and len(next(iter(heads))) > 1000


@pytest.mark.parametrize("unit", UNITS)
def test_what_is_pinned_twice_is_pinned_alike(unit: str) -> None:
    file = parse(text_of(unit))
    assert file.arguments["UV_IMAGE"].endswith(":" + pinned("uv.txt", "uv"))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"ARG VERSION={version}\n" in text_of(unit)


def test_the_context_holds_what_is_built_and_nothing_else() -> None:
    ignore = Ignore((ROOT / ".dockerignore").read_text())
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    sent = ignore.among(path for path in listed.stdout.splitlines() if (ROOT / path).is_file())
    tops = {path.partition("/")[0] for path in sent}
    folders = {"wire", "policies", "gateway", "logic", "inference", "cli", "examples", "requirements"}
    assert tops == {"pyproject.toml", "README.md", "LICENSE", "hatch_build.py", *folders}
    assert sum((ROOT / path).stat().st_size for path in sent) < MAX_CONTEXT_BYTES


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".venv/bin/python",
        ".env",
        "examples/.env",
        "gateway/oriel_gateway/.netrc",
        "terraform/aws/terraform.tfstate",
        "build/wheels/oriel.whl",
        "gateway/oriel_gateway/core.cpython-311-x86_64-linux-gnu.so",
        "gateway/oriel_gateway/__pycache__/core.cpython-311.pyc",
        "gateway/README.md",
        "tests/conftest.py",
        "requirements/dev.txt",
        "tenants.toml",
    ],
)
def test_what_may_lie_in_a_checkout_stays_out(path: str) -> None:
    assert not Ignore((ROOT / ".dockerignore").read_text()).lets_in(path)
