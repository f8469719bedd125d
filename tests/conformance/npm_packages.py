"""Packages of npm that tests need, installed from a committed lock into `build`, once for all test processes."""

import fcntl
import hashlib
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def installed(lock: Path) -> Path:
    """Return the `node_modules` with the packages of a `package-lock.json`, installed if needed.

    Skips the test if they cannot be installed.
    """
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm on PATH")
    name = lock.parent.name
    folder = ROOT / "build" / f"{name}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}"
    if not folder.exists() and (said := _install(npm, lock, folder)):
        pytest.skip(f"{name} cannot be installed from the npm registry: {said}")
    return folder / "node_modules"


@cache
def _install(npm: str, lock: Path, folder: Path) -> str:
    """Install the packages; return "" if that worked, else the reason. Test processes do it one at a time, in a folder
    beside the final one that is then moved.
    """
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if folder.exists():
            return ""
        beside = folder.with_suffix(".new")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        for name in ("package.json", "package-lock.json"):
            shutil.copy(lock.with_name(name), beside)
        flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", "--fetch-retries=0"]
        try:
            subprocess.run([npm, "ci", *flags], cwd=beside, capture_output=True, timeout=200, check=True)
        except subprocess.CalledProcessError as error:
            return error.stderr.decode(errors="replace").strip().partition("\n")[0] or "npm ci failed"
        except (OSError, subprocess.TimeoutExpired) as error:
            return type(error).__name__
        beside.rename(folder)
        return ""
