"""A root of one cloud, applied to the stand-in, and what tests ask about the result."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .harness import Workspace

REGIONS = {"aws": "eu-central-1", "gcp": "europe-west4", "azure": "westeurope"}
# Each address its own, so that mixed ones are told apart.
RULES = {"aws": {"aws_eip": {"set": {"allocation_id": "eipalloc-{seed}", "public_ip": "address-{seed}"}}}}


def given(cloud: str) -> dict[str, Any]:
    """Return the variables with which `applied_root` applies the root."""
    dns = {"zone": "example.com", "host": "api.example.com", "tls_secret": "api-tls"}
    return {"region": REGIONS[cloud], "dns": dns}


@contextmanager
def applied_root(cloud: str, folder: Path, tree: Path) -> Iterator[SimpleNamespace]:
    """Apply the root in `folder`; yields the workspace, its state, its resources and what was called."""
    with Workspace(cloud, folder, tree=tree, rules=RULES.get(cloud)) as workspace:
        workspace.init()
        state = workspace.apply(**given(cloud))
        yield SimpleNamespace(workspace=workspace, state=state, calls=workspace.calls, made=state.resources())


def the_object(applied, kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in applied.state.objects() if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def of_type(applied, type_name: str) -> dict[str, dict[str, Any]]:
    return applied.state.resources(type_name)


def objects(applied) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = applied.state.objects()
    return found
