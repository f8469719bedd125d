"""Values for the chart, from the fewest to some in every place."""

import json
from pathlib import Path
from typing import Any

import yaml

from .helm import CHART, KEYS
from .objects import Object

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
# A word that stands for every text in values/texts.yaml and values/names.yaml, and is in none of the chart's own.
PLAIN = "zzyzx"


def load(name: str) -> Any:
    return yaml.safe_load((Path(__file__).parent / f"values/{name}.yaml").read_text())


def smallest() -> dict[str, Any]:
    return {
        "infrastructure": {"model_repository_url": "s3://models/oriel"},
        "images": {"registry": "registry.example/oriel", "tag": "0.1.0"},
        "gpu_enabled": False,
        "keys": KEYS,
    }


def replaced(value: Any, word: str, plain: str = PLAIN) -> Any:
    """Return the value with another word in place of the plain one, in keys too."""
    if isinstance(value, dict):
        return {replaced(key, word, plain): replaced(each, word, plain) for key, each in value.items()}
    if isinstance(value, list):
        return [replaced(each, word, plain) for each in value]
    return value.replace(plain, word) if isinstance(value, str) else value


def anything(text: str) -> dict[str, Any]:
    """Values with the text wherever the schema takes any text."""
    return replaced(load("texts"), text) | {"keys": KEYS}


def named(name: str) -> dict[str, Any]:
    """Values with a name wherever the schema takes one of Kubernetes or of ours."""
    return replaced(load("names"), name) | {"keys": KEYS}


def in_order(found: list[Object]) -> list[Object]:
    """Return the objects by kind and name, without the sums of Secrets' texts, which differ with every text."""
    for each in found:
        template = each.get("spec", {}).get("template", {})
        template.get("metadata", {}).get("annotations", {}).pop("oriel.dev/secrets", None)
    return sorted(found, key=lambda each: (each["kind"], each["metadata"]["name"]))
