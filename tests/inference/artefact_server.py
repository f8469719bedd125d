"""A server whose models have compiled artefacts, and what a test asks about them."""

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from oriel_inference.app import Unit
from oriel_inference.artefacts.folder import ArtefactFolder
from oriel_inference.artefacts.offline import build_ahead, compilations
from oriel_inference.artefacts.process import BuildBounds
from oriel_inference.repository.compiling import Compilation

from ..waiting import until
from . import models
from .control_server import Served, serving

COMPILE = 'parameters { key: "oriel.compile" value { string_value: "onnxruntime-graph" } }\n'
COMPILED = models.DOUBLE + COMPILE


@asynccontextmanager
async def served(root: Path | str, folder: Path, **more: Any) -> AsyncIterator[Served]:
    async with serving(root, "none", artefact_folder=folder, **more) as one:
        yield one


def built_ahead(root: Path, folder: Path) -> Path:
    """Build the artefact of the only model without a server; return its folder."""
    ((_, one),) = compilations(root)
    assert isinstance(one, Compilation), one
    build_ahead(one, ArtefactFolder(folder, max_bytes=1 << 30), BuildBounds(), lambda phase, seconds: None)
    return only_artefact(folder)


def state(unit: Unit, name: str = "double") -> str:
    life = unit.catalog.get(name).artefact
    return life.state.value if life is not None else ""


async def until_state(one: Served, wanted: str, name: str = "double") -> None:
    def reached() -> bool:
        life = one.unit.catalog.get(name).artefact
        assert life is not None
        if life.state.value == wanted:
            return True
        assert life.state.value != "refused", life.text  # it will not get there any more
        return False

    await until(reached)


def outcomes(one: Served) -> dict[str, int]:
    keeper = one.unit.surface.control.artefacts
    assert keeper is not None
    return {outcome: count for (_, outcome), count in keeper.counts.outcomes.items()}


def only_artefact(folder: Path) -> Path:
    (found,) = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return found


def forge(artefact: Path, name: str, data: bytes) -> None:
    """Replace a file of an artefact, with the right checksum in its manifest."""
    (artefact / name).write_bytes(data)
    manifest = json.loads((artefact / "manifest.json").read_text())
    manifest["files"][name] = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (artefact / "manifest.json").write_text(json.dumps(manifest))
