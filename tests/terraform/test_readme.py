"""terraform/README.md says what the files say: the cost model's tables and assumptions, node types, variables."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from . import objects

README = Path(__file__).parents[2] / "terraform" / "README.md"


@pytest.fixture(scope="module")
def model() -> dict[str, Any]:
    return runpy.run_path(str(README.parent / "cost_model.py"))


def cpus(text: str) -> float:
    return float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)


def gib(text: str) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)(Mi|Gi)", text).groups()
    return float(number) / (1024 if unit == "Mi" else 1)


def test_the_tables_are_the_models(model) -> None:
    shown = README.read_text().split("<!-- cost_model.py -->\n")[1].split("<!-- /cost_model.py -->")[0]
    assert shown == "\n".join(model["table"]()) + "\n"
    assert model["PRICES_OF"] in README.read_text()


def test_the_models_pods_are_the_platforms(model, shared) -> None:
    found = objects.pods(objects.objects(shared, observability={}))
    for name, size in (("logic", "LOGIC_POD"), ("inference-cpu", "CPU_INFERENCE_POD"), ("inference-gpu", "GPU_POD")):
        requests = [each["resources"]["requests"] for each in found[name]["spec"]["containers"]]
        asked = sum(cpus(each["cpu"]) for each in requests), sum(gib(each["memory"]) for each in requests)
        assert asked == (model[size].cpus, model[size].gib), name


def test_the_models_nodes_are_the_roots(model, tree) -> None:
    text = README.read_text()
    for cloud in model["CLOUDS"]:
        nodes = (tree / cloud.name / "nodes.tf").read_text()
        for pool, kind in (("gpu_pool", cloud.gpu_type), ("cpu_pool", cloud.cpu_type)):
            assert re.search(rf'coalesce\(var\.{pool}\.instance_type, "{kind}"\)', nodes), f"{cloud.name} {pool}"
            assert text.count(kind) >= 2


def test_placement_never_needs_more_nodes_and_no_gpu_node_more(model) -> None:
    hours, nodes = model["Hours"], model["nodes"]
    for gpu in range(4):
        for logic in range(0, 30, 3):
            for inference in range(0, 12, 3):
                mix = hours("any", 1, gpu, logic, inference)
                without, shared = nodes(mix, placement=False), nodes(mix, placement=True)
                assert without[0] == shared[0] == gpu and shared[1] <= without[1]
    assert nodes(hours("spare", 1, 1, 4, 0), placement=True) == (1, 0), "four CPUs are left of eight"
    assert nodes(hours("full", 1, 1, 5, 0), placement=True) == (1, 1)
    assert nodes(hours("none", 1, 0, 3, 0), placement=True) == (0, 1)


def test_it_names_every_variable_and_output(tree) -> None:
    text = README.read_text()
    for file in (tree / "modules/roots").glob("*.tf"):
        for name in re.findall(r'^(?:variable|output) "(\w+)"', file.read_text(), re.M):
            assert f"`{name}`" in text, name


def test_what_it_says_of_waiting_is_so(shared) -> None:
    given = {"infrastructure": objects.INFRASTRUCTURE, "images": {"registry": "registry.example/oriel", "tag": "0.1.0"}}
    release = shared("modules/platform").plan(**given).values("helm_release.oriel")
    assert f"({release['timeout'] // 60} min by default)" in README.read_text()


def test_what_it_says_of_scaling_is_so(shared) -> None:
    found = objects.of(objects.objects(shared), "HorizontalPodAutoscaler")
    shares = {
        name: each["spec"]["metrics"][0]["resource"]["target"]["averageUtilization"] for name, each in found.items()
    }
    assert shares == {"gateway": 60, "logic": 70, "inference-cpu": 70, "inference-gpu": 50}
    assert "gateway 60 %, logic and CPU inference 70 %, GPU inference 50 %" in README.read_text(), json.dumps(shares)
