"""The images built for real, where ORIEL_TEST_ENGINE names an engine:
`make test SUITE=images ENGINE=buildah`.

On a base of nothing but Python and glibc that is made here, so no registry is asked; it has no C compiler, so the wheel
is pure. `test_stages.py` compiles it. Then their root is mounted
read-only, and the unit is started with what the image's own configuration says.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bare_base import lay_out

ROOT = Path(__file__).resolve().parents[2]
ENGINE = shlex.split(os.environ.get("ORIEL_TEST_ENGINE", ""))
pytestmark = [
    pytest.mark.skipif(not ENGINE, reason="ORIEL_TEST_ENGINE names no engine: images take minutes"),
    pytest.mark.timeout(1200),
]
BASE, UV = "localhost/oriel-test-base:1.0", "localhost/oriel-test-uv:1.0"
IMAGES = {"gateway": ("gateway", "gateway"), "logic": ("logic", "logic"), "inference-cpu": ("inference", "cpu")}
if os.environ.get("ORIEL_TEST_IMAGES") == "1":
    IMAGES |= {f"inference-{each}": ("inference", each) for each in ("openvino", "gpu")}


def engine(*words: str, check: bool = True) -> str:
    # In their own format podman and buildah leave HEALTHCHECK out.
    env = os.environ | {"BUILDAH_FORMAT": "docker"}
    done = subprocess.run([*ENGINE, *words], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if check:
        assert done.returncode == 0, (words, done.stdout[-3000:], done.stderr[-3000:])
        return done.stdout
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The base and the image of uv are there; the path of Python in the base."""
    folder = tmp_path_factory.mktemp("base")
    python = lay_out(folder / "root")
    (folder / "Base").write_text(
        "FROM scratch\nCOPY root /\nENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt\nUSER 1234\n"
    )
    shutil.copy(Path(sys.executable).with_name("uv"), folder / "uv")
    (folder / "Uv").write_text("FROM scratch\nCOPY uv /uv\n")
    for tag, file in ((BASE, "Base"), (UV, "Uv")):
        engine("build", "-t", tag, "-f", str(folder / file), str(folder))
    return python


def build(unit: str, target: str, python: str, *more: str, check: bool = True) -> str:
    arguments = {"BASE_IMAGE": BASE, "BUILD_IMAGE": BASE, "ORIEL_COMPILE": "0", "UV_IMAGE": UV, "PYTHON": python}
    arguments |= {"REVISION": "abc", "SOURCE": "https://x.example"}
    given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    words = ["build", *given, *more, "--target", target, "-f", f"{unit}/Dockerfile", "-t", f"localhost/test-{target}:1"]
    return engine(*words, ".", check=check)


@pytest.fixture(scope="module", params=IMAGES)
def image(request: pytest.FixtureRequest, base: str) -> Iterator[tuple[str, dict[str, Any], Path]]:
    """Its name, its configuration and its root, mounted."""
    unit, target = IMAGES[request.param]
    build(unit, target, base)
    told = json.loads(engine("inspect", "--type", "image", f"localhost/test-{target}:1"))
    container = engine("from", f"localhost/test-{target}:1").strip()
    yield request.param, told["Docker"]["config"], Path(engine("mount", container).strip())
    engine("rm", container)


def test_the_image_is_configured_as_its_dockerfile_says(image: tuple[str, dict[str, Any], Path]) -> None:
    name, config, root = image
    unit = IMAGES[name][0]
    assert config["User"] == "65532:65532" and config["Entrypoint"] == ["/opt/oriel/bin/oriel", unit]
    assert config["Labels"]["org.opencontainers.image.base.name"] == BASE
    assert config["Labels"]["org.opencontainers.image.revision"] == "abc"
    assert [path for path in ("bin/sh", "usr/bin/sh", "bin/bash", "uv", "src", "dist") if (root / path).exists()] == []


def test_nothing_but_its_state_belongs_to_its_user(image: tuple[str, dict[str, Any], Path]) -> None:
    _, _, root = image
    own = {str(path.relative_to(root)) for path in root.rglob("*") if path.lstat().st_uid == 65532}
    assert own == {"var/lib/oriel", "var/lib/oriel/cache"}
    open_to_all = [p for p in root.rglob("*") if not p.is_symlink() and p.lstat().st_mode & 0o002]
    assert [str(path.relative_to(root)) for path in open_to_all] == ["tmp"]


def test_the_unit_runs_in_the_image(image: tuple[str, dict[str, Any], Path]) -> None:
    """The image's root is all that the unit can see: no file of this machine."""
    name, config, root = image
    given = {
        "gateway": ("policies/examples", "etc/oriel/policies"),
        "logic": ("examples/services", "etc/oriel/services"),
        "inference": ("examples/models", "models"),
    }
    source, place = given[IMAGES[name][0]]
    shutil.copytree(ROOT / source, root / place, dirs_exist_ok=True)
    plan = {
        "root": str(root),
        "chroot": True,
        "writable": [f"{root}/var/lib/oriel", f"{root}/tmp"],
        "start": [*config["Entrypoint"], *config["Cmd"]],
        "env": dict(each.partition("=")[::2] for each in config["Env"]),
        "health": config["Healthcheck"]["Test"][1:],
        "drop": True,
        "post": None,
    }
    if name.startswith("inference"):
        plan["post"] = ["/v2/models/digits/infer", 8000, (ROOT / "examples/digits/7.v2.json").read_text()]
    words = ["unshare", "--mount", "--net", sys.executable, str(Path(__file__).with_name("sealed.py"))]
    done = subprocess.run(words, input=json.dumps(plan), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told.get("healthy") is True and told["code"] == 0, told
    assert told["written"] == ["/var/lib/oriel"] and told["user"] == 65532
    if name.startswith("inference"):
        assert json.loads(told["answer"]["body"])["outputs"][0]["name"] in ("label", "probabilities"), told
        assert told["answer"]["status"] == 200


@pytest.mark.parametrize("image", ["gateway"], indirect=True)
def test_make_lists_what_lies_in_the_image(image: tuple[str, dict[str, Any], Path], tmp_path: Path) -> None:
    """Judged by CycloneDX's own schema: every package in the environment with its version, Oriel too."""
    program = tmp_path / "buildah"
    program.write_text(f'#!/bin/sh\n[ $1 = build ] || exec {shlex.join(ENGINE)} "$@"\n')
    program.chmod(0o755)
    for unit in ("gateway", "logic"):
        engine("tag", "localhost/test-gateway:1", f"localhost/oriel-test/oriel-{unit}:1")
    given = ["REGISTRY=localhost/oriel-test", "TAG=1", "TARGETS=", f"ENGINE={program}", f"RECORDS={tmp_path}/out"]
    subprocess.run(["make", "images", "SBOM=1", *given], cwd=ROOT, check=True)
    written = (tmp_path / "out" / "oriel-gateway-1.cdx.json").read_text()
    judge = (
        "import sys\n"
        "from cyclonedx.schema import SchemaVersion\n"
        "from cyclonedx.validation.json import JsonStrictValidator\n"
        "wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(sys.stdin.read())\n"
        "sys.exit(wrong and str(wrong))"
    )
    words = [str(ROOT / "build/sbom/bin/python"), "-c", judge]
    done = subprocess.run(words, input=written, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = {each.get("purl", "").partition("?")[0] for each in json.loads(written)["components"]}
    folders = image[2].glob("opt/oriel/lib/python3*/site-packages/*.dist-info")
    names = [path.name.removesuffix(".dist-info").rpartition("-")[::2] for path in folders]
    installed = {f"pkg:pypi/{name.replace('_', '-').lower()}@{version}" for name, version in names}
    assert {each for each in told if each.startswith("pkg:pypi/")} == installed and len(installed) > 20


def test_two_builds_have_the_same_files(base: str) -> None:
    """Two builds differ only in times: names, contents, modes and owners of the added files are equal."""

    def files() -> dict[str, Any]:
        build("gateway", "gateway", base, "--no-cache", "--build-arg=SOURCE_DATE_EPOCH=1700000000")
        container = engine("from", "localhost/test-gateway:1").strip()
        root = Path(engine("mount", container).strip())
        try:
            return {
                str(path.relative_to(root)): (
                    path.lstat().st_mode,
                    path.lstat().st_uid,
                    hash(path.read_bytes()) if path.is_file() and not path.is_symlink() else None,
                )
                for path in root.rglob("*")
            }
        finally:
            engine("rm", container)

    first, second = files(), files()
    assert {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)} == set()


def test_a_base_that_lacks_a_library_fails_in_the_build(base: str, tmp_path: Path) -> None:
    python = lay_out(tmp_path / "root", without=("libstdc++.so.6",))
    (tmp_path / "Base").write_text(
        "FROM scratch\nCOPY root /\nENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt\nUSER 1234\n"
    )
    engine("build", "-t", "localhost/oriel-test-poor:1.0", "-f", str(tmp_path / "Base"), str(tmp_path))
    said = build("gateway", "gateway", python, "--build-arg=BASE_IMAGE=localhost/oriel-test-poor:1.0", check=False)
    assert "libstdc++.so.6: cannot open shared object file" in said
