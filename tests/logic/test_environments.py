"""A service with an environment of its own: `[tool.oriel] python = ".venv"`."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

HANDLER = """
import sys
import only_there
from oriel_logic import Refused, service
from prep import shout


@service(sample={"text": "hello"})
def answer(request):
    if not request.body:
        raise Refused("say something")
    return {"said": shout(request.json()["text"]), "number": only_there.NUMBER, "python": sys.prefix}
"""
LOOP = """
import only_there
from oriel_logic import service


@service
async def doubled(request, models, ctx):
    outputs = await models.infer("double", {"x": [[only_there.NUMBER, 1]]})
    return outputs["y"].tolist()
"""


def environment(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / ".venv")], check=True)
    (packages,) = (folder / ".venv/lib").glob("python*/site-packages")
    (packages / "only_there.py").write_text("NUMBER = 41\n")


def lay(folder: Path, handler: str, settings: str = 'python = ".venv"') -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "handler.py").write_text(handler)
    (folder / "prep.py").write_text("def shout(text): return text.upper()\n")
    (folder / "pyproject.toml").write_text(f"[tool.oriel]\n{settings}\n")


async def test_a_service_runs_in_its_own_environment_and_is_updated_there(stack: Any, services: Any) -> None:
    root = services()
    lay(root / "own", HANDLER)
    lay(root / "loop", LOOP)
    environment(root / "own")
    environment(root / "loop")
    lay(root / "later", HANDLER)
    lay(root / "broken", HANDLER, 'python = "python"')
    (root / "broken/python").write_text("#!/bin/sh\nexit 3\n")
    (root / "broken/python").chmod(0o755)
    logic = await stack(root)
    await logic.unit.updates.settled()
    assert logic.unit.is_ready, "what cannot be set up keeps nobody waiting"
    listed = {each["name"]: each for each in (await logic.client.get("/v1/services")).json()["services"]}
    assert {name for name, each in listed.items() if each["state"] == "ready"} == {"own", "loop"}, listed
    assert "python = '.venv' is not an environment: make it with `python -m venv .venv`" in listed["later"]["problem"]
    assert "its process ended while it was imported or set up" in listed["broken"]["problem"]
    refused = await logic.post("later", b"{}")
    assert (refused.status_code, refused.json()["error"]["reason"]) == (503, "service_broken")
    answer = await logic.post("own", b'{"text": "hi"}', content_type="application/json")
    assert answer.json() == {"said": "HI", "number": 41, "python": str(root / "own/.venv")}
    assert (await logic.post("own", b"")).status_code == 422
    assert "only_there" not in sys.modules and not [name for name in sys.modules if "own" in name.split(".")]
    assert (await logic.post("loop", b"{}")).json() == [[82.0, 2.0]]
    # What is installed changes: the service is set up anew, and its sample is tried there.
    (packages,) = (root / "own/.venv/lib").glob("python*/site-packages")
    (packages / "only_there.py").unlink()
    (packages / "other.py").write_text("")
    await asyncio.to_thread(environment, root / "later")
    for _ in range(2):
        await logic.unit.updates.poll()
    await logic.unit.updates.settled()
    found = (await logic.client.get("/v1/services/own")).json()
    assert "No module named 'only_there'" in found["update"]["problem"]
    assert (await logic.post("own", b'{"text": "hi"}')).json()["number"] == 41
    assert (await logic.post("later", b'{"text": "hi"}')).json()["number"] == 41
