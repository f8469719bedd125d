"""Pools of groups whose models the gateway places, with their servers' arguments, and of servers that run elsewhere."""

import argparse

import pytest

import oriel_inference.command
from oriel_policies.documents import Snapshot, compile_documents

from . import objects
from .conftest import Shared

GIB = 2**30
PLACED = {
    "chat": {
        "accelerator": "gpu",
        "models": ["chat-*"],
        "place_models": True,
        "args": ["--gpu-model-memory-budget=20000000000"],
    },
    "small": {"accelerator": "cpu", "models": ["small-*"], "place_models": True, "memory": 10},
    "rest": {"accelerator": "cpu"},
}
NEURON = {"address": "neuron.serving.svc", "port": 8000, "grpc_port": 8001, "models": ["bert-*", "resnet"]}


def snapshot(found: list[objects.Object]) -> Snapshot:
    data = objects.of(found, "ConfigMap")["policies"]["data"]
    return compile_documents({name: text.encode() for name, text in data.items()})


def servers(found: list[objects.Object]) -> dict[str, argparse.Namespace]:
    """Return name of the group's Deployment -> what `oriel inference` reads from its arguments."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    oriel_inference.command.add_arguments(parser)
    return {
        name: parser.parse_args(template["spec"]["containers"][0]["args"])
        for name, template in objects.pods(found).items()
        if name.startswith("inference-")
    }


@pytest.mark.parametrize("keda", [True, False])
def test_models_are_placed_in_the_pools_of_the_groups_that_ask_for_it(shared: Shared, keda: bool) -> None:
    found = objects.objects(shared, keda={"enabled": keda}, model_groups=PLACED)
    pools = {name: pool.place_models for name, pool in snapshot(found).pools.items() if name != "logic"}
    last = "inference-rest" if keda else "inference"  # the pool of all groups, for models that no group names
    assert pools == {"inference-chat": True, "inference-small": True, last: False}
    read = servers(found)
    assert {name: each.control_mode for name, each in read.items()} == {
        "inference-chat": "demand",
        "inference-small": "demand",
        "inference-rest": "poll",
    }
    assert read["inference-small"].model_memory_bytes == 6 * GIB
    assert 0 < read["inference-chat"].model_memory_bytes < 12 * GIB  # of the 12 GiB that a GPU pod has
    assert (read["inference-chat"].gpu_memory_bytes, read["inference-rest"].model_memory_bytes) == (20_000_000_000, 0)


def test_the_only_group_has_the_pool_of_all_models_for_itself_also_without_keda(shared: Shared) -> None:
    budget = ["--model-memory-budget", str(GIB)]
    only = {"cpu": {"accelerator": "cpu", "place_models": True, "args": budget}}
    found = objects.objects(shared, gpu_enabled=False, model_groups=only)
    assert snapshot(found).pools["inference"].place_models
    assert servers(found)["inference-cpu"].model_memory_bytes == GIB  # the caller's own number is the last word


def test_servers_that_run_elsewhere_are_pools_whose_routes_come_before_those_of_all_others(shared: Shared) -> None:
    language = {"address": "llm.example", "port": 80, "services": ["completions"], "networks": ["10.1.2.0/24"]}
    given = {"neuron": NEURON, "language": language | {"idle_timeout_ms": 4000}}
    read = snapshot(objects.at(shared, False, True, True, policies={"pools": given}))
    pools = [(each.discover, each.grpc_discover, each.probe) for name, each in read.pools.items() if name in given]
    neuron = (("neuron.serving.svc", 8000), ("neuron.serving.svc", 8001), "/v2/health/ready")
    assert pools == [(("llm.example", 80), None, "/health"), neuron]
    routed = [(route.model or route.service, route.pool) for route in read.routes]
    assert routed[:3] == [("completions", "language"), ("resnet", "neuron"), ("bert-*", "neuron")]
    assert routed[3:] == [("*", "inference-cpu"), ("*", "logic")] and read.pools["language"].idle_timeout_s == 4.0


def test_group_with_an_engine_runs_its_command_and_is_a_pool_of_its_services(shared: Shared) -> None:
    command = ["vllm", "serve", "some/model", "--port", "8000", "--scheduling-policy", "priority"]
    groups = {
        "chat": {"accelerator": "gpu", "engine": {"kind": "vllm", "image": "vllm/vllm-openai:v1", "command": command}}
    }
    found = objects.objects(shared, keda={"enabled": True}, model_groups=groups | {"rest": {"accelerator": "cpu"}})
    (container,) = objects.pods(found)["inference-chat"]["spec"]["containers"]
    assert (container["image"], container["command"], container.get("args")) == ("vllm/vllm-openai:v1", command, None)
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    read = snapshot(found)
    pool = read.pools["inference-chat"]
    assert (pool.engine, pool.probe, pool.grpc_discover) == ("vllm", "/health", None) and pool.scaling is not None
    routed = {route.service or route.model: route.pool for route in read.routes}
    assert routed["chat.completions"] == routed["completions"] == "inference-chat" and routed["*"] == "logic"
