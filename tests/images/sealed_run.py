"""Starts what `image_stages` has installed as an engine would with --read-only; returns the report of `sealed.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dockerfile import Dockerfile
from image_stages import Root

__all__ = ["run_sealed"]

SEALED = Path(__file__).with_name("sealed.py")


def run_sealed(root: Root, file: Dockerfile, target: str, post: tuple[str, int, str] | None = None) -> dict[str, Any]:
    """Run the unit. post: path, port and body of a request to send once it is healthy.

    Skips the test where the kernel gives it no namespaces.
    """
    for path in root.folder.glob("*"):
        path.chmod(path.stat().st_mode | 0o055) if not path.is_symlink() else None
    state, temporary = root.at("/var/lib/oriel"), root.at("/tmp")
    for each in (state, temporary):
        each.mkdir(parents=True, exist_ok=True)
    chain = [each for stage in file.chain(target) for each in stage.instructions]
    words = {each.name: list(each.words or ()) for each in chain if each.words is not None}
    plan = {
        "root": str(root.folder),
        "writable": [str(state), str(temporary)],
        "start": root.words([*words["ENTRYPOINT"], *words["CMD"]]),
        "env": root.environment(target) | {"TMPDIR": str(temporary)},
        "health": root.words(words["HEALTHCHECK"]),
        "drop": os.geteuid() == 0,
        "post": post,
    }
    unshare = ["unshare", "--mount", "--net"]
    for own in (unshare, [*unshare, "--user", "--map-root-user"]):
        if subprocess.run([*own, "true"], capture_output=True, check=False).returncode == 0:
            break
    else:
        pytest.skip("this kernel gives a test no namespaces: the unit is not started sealed")
    done = subprocess.run(
        [*own, sys.executable, str(SEALED)], input=json.dumps(plan), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told
