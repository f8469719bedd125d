"""Kubernetes' own schemas, and those of KEDA's and the Prometheus operator's kinds."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

# The oldest that the chart takes, and two that clusters have by default.
VERSIONS = ("1.30", "1.34", "1.36")
CRDS = Path(__file__).parent / "crds"
CUSTOM = frozenset(file.stem for file in CRDS.glob("*.json"))
WRONG = (kubernetes_validate.ValidationError, jsonschema.ValidationError)
# It reads all of Kubernetes' schemas for each object that it judges.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)


@cache
def crd(kind: str) -> jsonschema.Draft7Validator:
    schema = json.loads((CRDS / f"{kind}.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


@cache
def _judged(version: str, text: str) -> None:
    """Points of the matrix share most of their objects: each is judged once."""
    each = json.loads(text)
    if each["kind"] in CUSTOM:
        crd(each["kind"]).validate(each)
    else:
        kubernetes_validate.validate(each, version, strict=True)


def judge(each: Any, version: str) -> None:
    """Raises one of WRONG where it is no object that this version of Kubernetes takes."""
    _judged(version, json.dumps(each, sort_keys=True))
