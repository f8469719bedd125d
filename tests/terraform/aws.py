"""terraform/aws, applied to the stand-in, and what tests ask about the result."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .harness import Workspace

GIVEN: dict[str, Any] = {
    "region": "eu-central-1",
    "dns": {"zone": "example.com", "host": "api.example.com", "tls_secret": "api-tls"},
}
CLUSTER_POLICY = "arn:aws:iam::aws:policy/"
# Each address its own, so that mixed ones are told apart.
RULES = {"aws_eip": {"set": {"allocation_id": "eipalloc-{seed}", "public_ip": "address-{seed}"}}}


@contextmanager
def applied_aws(folder: Path, tree: Path) -> Iterator[SimpleNamespace]:
    """Apply terraform/aws of `tree` in `folder`; yields the workspace, its state, its resources and what was called."""
    with Workspace("aws", folder, tree=tree, rules=RULES) as workspace:
        workspace.init()
        state = workspace.apply(**GIVEN)
        yield SimpleNamespace(workspace=workspace, state=state, calls=workspace.calls, made=state.resources())


def of_type(applied, type_name: str) -> dict[str, dict[str, Any]]:
    return applied.state.resources(type_name)


def objects(applied) -> list[dict[str, Any]]:
    documents = [json.loads(text) for each in of_type(applied, "helm_release").values() for text in each["values"]]
    return [each for document in documents for each in document.get("objects", [])]


def position(calls, action: str, address: str) -> int:
    """Return the place of an action in the log of calls. Raises ValueError if it was not done."""
    return [(call.action, call.address) for call in calls].index((action, address))
