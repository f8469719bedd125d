"""The Kubernetes objects of the platform in a plan, which is made once per set of variables and test run."""

import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import product
from typing import Any

from .conftest import Shared

Object = dict[str, Any]
Releases = dict[str, list[Object]]

INFRASTRUCTURE: dict[str, Any] = {
    "cloud": "aws",
    "cluster_name": "oriel",
    "cluster_endpoint": "https://cluster.example",
    "cluster_ca_certificate": "-----BEGIN CERTIFICATE-----",
    "cluster_auth": {"api_version": "client.authentication.k8s.io/v1", "command": "aws", "args": ["eks", "get-token"]},
    "registry_url": "registry.example/oriel",
    "model_repository_url": "s3://models.example/models",
    "redis_url": "rediss://redis.example:6380",
    "redis_tls": True,
    "redis_auth_secret_ref": {"name": "oriel-redis-auth", "key": "password"},
    "workload_identity": {},
    "gpu_node_selector": {"oriel.dev/pool": "gpu"},
    "gpu_taint": {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},
    "storage_class": "gp3",
}
WATCHED = {"service_monitors": True, "otlp": {"endpoint": "https://otlp.example"}}
# The default groups, with the models of all but one.
NAMED = {"cpu": {"accelerator": "cpu"}, "gpu": {"accelerator": "gpu", "models": ["gpu-*"]}}

# gpu_enabled, scale_to_zero, keda.enabled
MATRIX = tuple(product((True, False), repeat=3))


def releases(shared: Shared, *, infrastructure: Mapping[str, Any] | None = None, **variables: Any) -> Releases:
    """Return address of the release -> its objects."""
    given = {
        "infrastructure": INFRASTRUCTURE | dict(infrastructure or {}),
        "images": {"registry": "registry.example/oriel", "tag": "0.1.0"},
        **variables,
    }
    name = f"plan-{sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:32]}"
    planned: Releases = shared.once(name, lambda: shared("modules/platform").plan(**given).releases())
    return planned


def objects(shared: Shared, **variables: Any) -> list[Object]:
    """Return all objects. infrastructure: what differs from INFRASTRUCTURE; the rest: variables of the module."""
    return [each for found in releases(shared, **variables).values() for each in found]


def at(shared: Shared, gpu: bool, zero: bool, keda: bool, **variables: Any) -> list[Object]:
    """Return the objects at one point of the matrix, with everything switched on that can be."""
    variables.setdefault("observability", WATCHED)
    if gpu and keda:  # of two groups that name no model, nobody could say which one to start
        variables.setdefault("model_groups", NAMED)
    return objects(shared, gpu_enabled=gpu, scale_to_zero=zero, keda={"enabled": keda}, **variables)


def of(found: Iterable[Object], kind: str) -> dict[str, Object]:
    """Return name -> object, of one kind."""
    return {each["metadata"]["name"]: each for each in found if each["kind"] == kind}


def pods(found: Iterable[Object]) -> dict[str, Object]:
    """Return name of the Deployment or DaemonSet -> its pod template."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in found
        if each["kind"] in ("Deployment", "DaemonSet", "StatefulSet", "Job")
    }


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every scalar with its path; keys count as scalars too."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield f"{path}.{key}", key
            yield from leaves(each, f"{path}.{key}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from leaves(each, f"{path}[{number}]")
    else:
        yield path, value
