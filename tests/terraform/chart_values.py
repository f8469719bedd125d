"""Values for the chart, from the fewest to some in every place."""

import json
from typing import Any

from .helm import CHART, KEYS
from .objects import Object

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
# A word that stands for every text, and is in none of the chart's own.
PLAIN = "zzyzx"


def anything(text: str) -> dict[str, Any]:
    """Values with the text wherever the schema takes any text."""
    return smallest() | {
        "infrastructure": {
            **smallest()["infrastructure"],
            "workload_identity": {
                "service_account_annotations": {"gateway": {"a/b": text, text: "c"}},
                "pod_labels": {"pod": text},
            },
            "gpu_node_selector": {"pool": text},
            "gpu_taint": {"key": text, "value": text, "effect": "NoSchedule"},
            "storage": {"provisioner": text, "parameters": {text: text}},
            "secrets": {"more": {text: text}},
        },
        "gpu_enabled": True,
        "keda": {"enabled": True},
        "gateway": {"service_annotations": {"a/b": text, text: "c"}, "load_balancer_class": text, "args": [text, text]},
        "logic": {"image": text, "services": {"a.py": text}, "folders": [f"/{text}"], "args": [text]},
        "model_groups": {
            "own": {"accelerator": "gpu", "args": [text], "models": ["m"], "repository": f"s3://{text}"},
            "engine": {"accelerator": "gpu", "engine": {"kind": "vllm", "image": text, "command": [text, text]}},
        },
        "policies": {"documents": {"more.toml": text}, "store": None},
        "redis": {"image": f"{text}:1"},
        "placement": {"pause_image": f"{text}:1"},
        "observability": {
            "service_monitors": True,
            "monitor_labels": {"release": text},
            "otlp": {"endpoint": "https://otlp.example", "image": text},
        },
    }


def named(name: str) -> dict[str, Any]:
    """Values with a name wherever the schema takes one of Kubernetes or of ours."""
    ref = {"name": name, "key": name}
    return smallest() | {
        "infrastructure": {
            **smallest()["infrastructure"],
            "redis_url": "rediss://redis.example:6380",
            "redis_tls": True,
            "redis_auth_secret_ref": ref,
            "gpu_node_selector": {"pool": "gpu"},
            "storage_class": name,
            "secrets": {name: {name: "x"}},
        },
        "gpu_enabled": True,
        "images": {"registry": "r.example/o", "tag": name, "pull_secret": name},
        "gateway": {
            "tls_secret": name,
            "admin_token_secret_ref": ref,
            "ticket_keys_secret_ref": ref,
            "credentials": name,
            "load_balancer_ip": "1.2.3.4",
        },
        "model_groups": {
            "own": {"accelerator": "cpu", "credentials": name, "models": [name], "cache": {"claim": True}},
            "engine": {
                "accelerator": "gpu",
                "engine": {"kind": "vllm", "image": "i", "command": ["c"], "services": [name]},
            },
        },
        "policies": {
            "tenants": {name: {"tier": name, "keys_sha256": ["0" * 64]}},
            "documents": {"t.toml": f"[tiers.{name}]"},
        },
        "keda": {"enabled": True, "namespace": name},
        "observability": {"namespace": name, "otlp": {"endpoint": "https://o", "authorization_secret_ref": ref}},
    }


def smallest() -> dict[str, Any]:
    return {
        "infrastructure": {"model_repository_url": "s3://models/oriel"},
        "images": {"registry": "registry.example/oriel", "tag": "0.1.0"},
        "gpu_enabled": False,
        "keys": KEYS,
    }


def in_order(found: list[Object]) -> list[Object]:
    return sorted(found, key=lambda each: (each["kind"], each["metadata"]["name"]))
