"""`oriel logic build FOLDER`: writes a folder from which a container engine builds an image of the author's services.

build/NAME/Dockerfile        like logic/Dockerfile of Oriel itself: docs/images.md
build/NAME/requirements.txt  the dependencies in the services' `pyproject.toml`, Oriel included, pinned by hash
build/NAME/wheels/           Oriel's wheels: the compiled one, and the pure one for an image with another Python
build/NAME/services/         the services: no tests, no fakes, no hidden files, no environment of this machine
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from oriel_logic.dev.target import Target, find
from oriel_logic.loading.folder_config import BadConfig, read_config
from oriel_logic.loading.listing import MAX_FILES, files_in, neighbours
from oriel_logic.loading.sources import HANDLER, NO_HANDLER
from oriel_wire.distribution import NAME as DISTRIBUTION
from oriel_wire.errors import StartFailed

MADE_BY_US = "# Written by `oriel logic build`"
WRITABLE = "--tmpfs /tmp --tmpfs /var/lib/oriel:uid=65532"
MAX_BYTES = 1 << 30
LOCK_TIMEOUT_S = 300.0
PYPROJECT = "pyproject.toml"
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?")
_LABEL = re.compile(r"[^A-Za-z0-9 ,.+_-]")
_REFERENCE = re.compile(r"[^a-z0-9.-]+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", type=Path, metavar="FILE_OR_FOLDER", help="a service, or a folder of services")
    parser.add_argument(
        "--wheel",
        type=Path,
        metavar="FILE",
        help="Oriel's wheel, with those of its version beside it; 'make wheel' in a checkout of Oriel builds both",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="the folder to write (default build/NAME)")


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit code. Raises StartFailed."""
    target = find(args.target)
    name = _REFERENCE.sub("-", (target.root.stem if target.root.is_file() else target.root.name).lower()).strip("-.")
    out = args.out or Path("build") / (name or "services")
    version = build(target, name or "services", wheels_of(args.wheel), out)
    tag = f"{name or 'services'}:{version}"
    sys.stdout.write(
        f"{out}  Dockerfile, requirements.txt, wheels, services\n\n"
        f"Build it:  docker build -t {tag} {out}\n"
        f"Try it:    docker run --rm --init --read-only {WRITABLE} -p 8090:8090 {tag}\n"
    )
    return 0


def build(target: Target, name: str, wheels: Sequence[Path], out: Path) -> str:
    """Write the context into `out`; return the version of the image. Raises StartFailed, and leaves `out` unchanged
    then.
    """
    if out.exists() and not is_ours(out):
        raise StartFailed(f"{out} exists and was not made by 'oriel logic build': choose another --out")
    projects = [read_project(path) for path in pyprojects(target)]
    requirements, extras = requirements_of(projects)
    version = str(projects[0].get("version", "1")) if projects else "1"
    if target.root.resolve().is_relative_to(out.resolve()):
        raise StartFailed(f"{out} holds the services themselves: choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".oriel-build-") as made:
        context = Path(made) / "context"
        (context / "wheels").mkdir(parents=True)
        for wheel in wheels:
            shutil.copyfile(wheel, context / "wheels" / wheel.name)
        copy_services(target, out, context / "services")
        extra = f"[{','.join(extras)}]" if extras else ""
        wanted = [f"{DISTRIBUTION}{extra}=={wheel_version(wheels[0])}", *requirements]
        (context / "requirements.txt").write_text(locked(wanted, context))
        (context / "Dockerfile").write_text(dockerfile(target, name, version, projects))
        (context / ".dockerignore").write_text("*\n!requirements.txt\n!wheels\n!services\n**/__pycache__\n")
        if out.exists():
            out.rename(Path(made) / "before")
        context.rename(out)
    return version


def is_ours(out: Path) -> bool:
    try:
        with (out / "Dockerfile").open() as file:
            return file.readline().startswith(MADE_BY_US)
    except OSError:
        return False


def dockerfile(target: Target, name: str, version: str, projects: Sequence[dict[str, Any]]) -> str:
    words = {
        "NAME": name,
        "VERSION": label(version),
        "SERVICES": label(", ".join(dict.fromkeys(file.name for file in target.files))),
        "LICENSE": label(str(projects[0].get("license", "unknown")) if projects else "unknown"),
    }
    text = (files("oriel_logic.dev") / "scaffold" / "Dockerfile.txt").read_text("utf-8")
    return re.sub(r"@([A-Z]+)@", lambda found: words[found[1]], text)


def label(text: str) -> str:
    """Return a text without anything that a Dockerfile would interpret."""
    return _LABEL.sub("-", text)[:200]


def pyprojects(target: Target) -> Iterator[Path]:
    """Yield the `pyproject.toml` of the services' folders, and of the folder above a service's versions or services."""
    folders = [target.root if target.root.is_dir() else target.root.parent]
    for file in target.files:
        if file.folder is not None and file.path is not None and file.path.name == HANDLER:
            folders += [file.folder, *([file.folder.parent] if file.folder.name != file.name else [])]
    for folder in dict.fromkeys(folders):
        try:
            config = read_config(folder)
        except BadConfig as error:
            raise StartFailed(f"{folder.name}: {error}") from error
        if config.python:
            raise StartFailed(
                f"{folder.name}/{PYPROJECT}: python = {config.python!r} is an environment of this machine; an image "
                "has one for all its services: list the packages under [project] dependencies and remove `python`"
            )
        if (folder / PYPROJECT).is_file():
            yield folder / PYPROJECT


def read_project(path: Path) -> dict[str, Any]:
    """Return `[project]` of a file that `read_config` has parsed."""
    project = tomllib.loads(path.read_text("utf-8")).get("project", {})
    listed = project.get("dependencies", []) if isinstance(project, dict) else None
    if not isinstance(listed, list) or not all(isinstance(each, str) and each.isprintable() for each in listed):
        raise StartFailed(f"{path.parent.name}/{PYPROJECT}: [project] dependencies must be a list of texts")
    return dict(project)


def requirements_of(projects: Iterable[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the dependencies of all projects beside Oriel, and the extras of Oriel that they name."""
    others: dict[str, None] = {}
    extras: set[str] = set()
    for project in projects:
        for text in project.get("dependencies", []):
            found = _REQUIREMENT.match(text)
            if found is None or text.startswith("-"):
                raise StartFailed(f"{text[:100]!r} under [project] dependencies is not a requirement")
            if re.sub(r"[-_.]+", "-", found[1]).lower() == DISTRIBUTION:
                extras |= {each.strip() for each in (found[2] or "").split(",") if each.strip()}
            else:
                others[text.strip()] = None
    return list(others), sorted(extras)


def wheels_of(given: Path | None) -> list[Path]:
    """Find Oriel's newest wheel, or take the given one, with all wheels of its version beside it: the compiled one and
    the pure one. Raises StartFailed, which says how to make them.
    """
    if given is not None and (not given.is_file() or wheel_version(given) == ""):
        raise StartFailed(
            f"{given} is not a wheel of Oriel: 'make wheel' in a checkout of Oriel builds dist/oriel_serving-*.whl"
        )
    checkout = Path(__file__).resolve().parents[3]
    found = [path for dist in (Path("dist"), checkout / "dist") for path in dist.glob("oriel_serving-*.whl")]
    if given is None and not found:
        raise StartFailed(
            "there is no wheel of Oriel here: build one with 'make wheel' in a checkout of Oriel, and pass --wheel"
        )
    newest = given or max(found, key=lambda path: path.stat().st_mtime)
    return sorted(newest.parent.glob(f"oriel_serving-{wheel_version(newest)}-*.whl"))


def wheel_version(wheel: Path) -> str:
    found = re.fullmatch(r"oriel_serving-([A-Za-z0-9.+!]+)-[^/]*\.whl", wheel.name)
    return found[1] if found else ""


def copy_services(target: Target, out: Path, into: Path) -> None:
    """Copy the services under their names here. Raises StartFailed."""
    root = target.root if target.root.is_dir() else target.root.parent
    below = into / root.name if (root / HANDLER).exists() else into
    sources = list(files_in(root))
    if target.root.is_file():
        samples = root.glob(f"{target.root.stem}.sample.*")
        sources = [target.root, *neighbours(target.root), *samples]
    if len(sources) >= MAX_FILES:
        raise StartFailed(f"{root} holds {MAX_FILES} files or more: that is not a folder of services")
    left = MAX_BYTES
    for path in sources:
        part = path.relative_to(root)
        if path.resolve().is_relative_to(out.resolve()) or is_for_tests(path):
            continue
        if not path.resolve().is_relative_to(root.resolve()) or not path.is_file():
            raise StartFailed(
                f"{part} is not a regular file, or leads out of the folder: an image takes only files of the folder"
            )
        left -= path.stat().st_size
        if left < 0:
            raise StartFailed(
                f"{root} holds more than {MAX_BYTES >> 20} MiB: fetch large files from a store, in `setup`"
            )
        (below / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, below / part)


def is_for_tests(path: Path) -> bool:
    return path.name != PYPROJECT and NO_HANDLER.match(path.name) is not None


def locked(wanted: Sequence[str], context: Path) -> str:
    """Resolve `wanted` with uv: each package with its version and hashes. Raises StartFailed."""
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.is_file() else shutil.which("uv")
    if uv is None:
        raise StartFailed("'oriel logic build' pins what it installs with uv, which is missing: 'pip install uv'")
    options = [
        "--universal",
        "--python-version",
        "3.11",
        "--generate-hashes",
        "--no-annotate",
        "--no-header",
        "--no-build",
    ]
    words = [uv, "pip", "compile", *options, "--quiet", "--no-emit-index-url", "--no-emit-find-links"]
    try:
        done = subprocess.run(
            [*words, "--find-links", "wheels", "-"],
            input="\n".join(wanted) + "\n",
            cwd=context,
            capture_output=True,
            text=True,
            timeout=LOCK_TIMEOUT_S,
            env={**os.environ, "NO_COLOR": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise StartFailed(f"uv did not resolve the dependencies within {LOCK_TIMEOUT_S:.0f} s") from late
    if done.returncode:
        raise StartFailed(f"uv cannot resolve the dependencies: {done.stderr.strip()[-600:]}")
    return pinned(done.stdout, sorted((context / "wheels").iterdir()))


def pinned(resolved: str, wheels: Sequence[Path]) -> str:
    """Put the hashes of these wheels into the resolved requirements, so that no other wheel is installed."""
    digests = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels]
    hashes = " \\\n".join(f"    --hash=sha256:{digest}" for digest in digests)
    pin = f"{DISTRIBUTION}=={wheel_version(wheels[0])} \\\n{hashes}\n"
    return re.sub(rf"^{DISTRIBUTION}(\[[^\]]*\])?==.*\n(?:    .*\n)*", lambda _: pin, resolved, flags=re.MULTILINE)
