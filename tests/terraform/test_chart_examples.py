"""`make manifests`, and the examples of deploy/examples for those who install without Terraform."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from . import judges, objects
from .chart_values import in_order
from .helm import CHART, binary, rendered
from .scheduling import Node, Pod, why_not

EXAMPLES = CHART.parent / "examples"
EXTERNAL = {"keys": {"external": True}}


def documents(*files: Path) -> list[Any]:
    return [each for file in files for each in yaml.load_all(file.read_text(), Loader=yaml.CSafeLoader) if each]


def of_kind(file: str, kind: str) -> Any:
    (found,) = [each for each in documents(EXAMPLES / file) if each["kind"] == kind]
    return found


@pytest.fixture(scope="module")
def smallest() -> Any:
    (values,) = documents(EXAMPLES / "values.yaml")
    return values


def make(values: Any, folder: Path, namespace: str) -> Path:
    """Return the folder that `make manifests` writes."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    arguments = ("--silent", "manifests", f"VALUES={file}", f"OUT={folder}", f"NAMESPACE={namespace}")
    arguments += (f"HELM={binary('helm')}",)
    subprocess.run(["make", *arguments], cwd=CHART.parents[1], check=True, capture_output=True, timeout=60)
    file.unlink()
    return folder / "oriel"


def test_manifests_are_the_charts_objects_without_keys(tmp_path, smallest) -> None:
    make(smallest, tmp_path, "models")
    elsewhere = {
        **smallest,
        "infrastructure": {**smallest["infrastructure"], "redis_url": "redis://redis.example:6379"},
    }
    made = make(elsewhere, tmp_path, "models")  # what the first run wrote of Redis is gone
    (kustomization,) = documents(made / "kustomization.yaml")
    files = [made / name for name in kustomization["resources"]]
    assert set(files) == set(made.rglob("*.yaml")) - {made / "kustomization.yaml"}
    found = documents(*files)
    assert in_order(found) == in_order(rendered(elsewhere | EXTERNAL, namespace="models"))
    assert "Secret" not in {each["kind"] for each in found}


def test_manifests_without_values_are_refused_with_the_remedy() -> None:
    done = subprocess.run(["make", "-s", "manifests"], cwd=CHART.parents[1], capture_output=True, text=True, timeout=60)
    assert done.returncode and "pass VALUES=FILE" in done.stderr


def test_kustomize_builds_the_example_of_the_manifests(tmp_path, smallest) -> None:
    shutil.copytree(EXAMPLES / "kustomize", tmp_path, dirs_exist_ok=True)
    make(smallest, tmp_path, "oriel")
    done = subprocess.run([binary("kubectl"), "kustomize", str(tmp_path)], check=True, capture_output=True, timeout=60)
    found = [each for each in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if each]
    wanted = [*rendered(smallest | EXTERNAL), of_kind("kustomize/namespace.yaml", "Namespace")]
    for each in wanted:
        each["metadata"]["labels"]["example.com/team"] = "platform"
        if (each["kind"], each["metadata"]["name"]) == ("Deployment", "gateway"):
            assert each["spec"]["revisionHistoryLimit"] == 5
            each["spec"]["revisionHistoryLimit"] = 10
    assert in_order(found) == in_order(wanted)


def test_argo_cd_renders_the_same_objects_at_each_look() -> None:
    spec = of_kind("argocd/application.yaml", "Application")["spec"]
    assert (CHART.parents[1] / spec["source"]["path"]).resolve() == CHART
    values, namespace = spec["source"]["helm"]["valuesObject"], spec["destination"]["namespace"]
    once = rendered(values, namespace=namespace)
    assert once == rendered(values, namespace=namespace) and "Secret" not in {each["kind"] for each in once}


def test_flux_installs_the_chart_of_its_source() -> None:
    release, source = of_kind("flux/release.yaml", "HelmRelease"), of_kind("flux/release.yaml", "GitRepository")
    chart = release["spec"]["chart"]["spec"]
    assert (CHART.parents[1] / chart["chart"]).resolve() == CHART
    assert chart["sourceRef"] == {"kind": source["kind"], "name": source["metadata"]["name"]}
    assert rendered(release["spec"]["values"], namespace=release["metadata"]["namespace"])


def test_an_issuer_without_keys_is_the_clusters() -> None:
    """Only there does cert-manager use the cloud identity of its own pods, unless a flag says otherwise."""
    issuer, certificate = documents(EXAMPLES / "cert-manager/certificate.yaml")
    (solver,) = issuer["spec"]["acme"]["solvers"]
    assert "accessKeyID" not in solver["dns01"]["route53"]
    assert certificate["spec"]["issuerRef"] == {"kind": "ClusterIssuer", "name": issuer["metadata"]["name"]}
    assert issuer["kind"] == "ClusterIssuer" and "namespace" not in issuer["metadata"]


def test_karpenters_pools_take_the_pods_that_ask_for_them(smallest) -> None:
    groups = {
        "chat": {"accelerator": "gpu", "models": ["chat"], "spot": {"replicas": 2}},
        "cpu": {"accelerator": "cpu"},
    }
    switches: dict[str, Any] = {"gpu_enabled": True, "keda": {"enabled": True}, "placement": {"share_gpu_nodes": False}}
    switches["infrastructure"] = {**smallest["infrastructure"], "gpu_node_selector": {"oriel.dev/pool": "gpu"}}
    found = rendered(smallest | switches | {"model_groups": groups})
    assert not objects.of(found, "DaemonSet"), "Karpenter imagines no node with its pods"
    size = {"cpu": 32.0, "memory": 2.0**38, "ephemeral-storage": 2.0**40, "nvidia.com/gpu": 8.0}
    nodes = []
    for pool in documents(EXAMPLES / "karpenter/nodepools.yaml"):
        judges.judge(pool, judges.VERSIONS[0])
        template = pool["spec"]["template"]
        nodes.append(
            Node(pool["metadata"]["name"], template["metadata"]["labels"], size, template["spec"].get("taints", []))
        )
    pods = objects.pods(found)
    fits = {
        name: [node.name for node in nodes if not why_not(Pod(name, pods[name]), node)]
        for name in ("gateway", "logic", "inference-cpu", "inference-chat", "inference-chat-spot")
    }
    assert fits.pop("inference-chat") == ["oriel-gpu"] and fits.pop("inference-chat-spot") == ["oriel-gpu-spot"]
    assert set(map(tuple, fits.values())) == {("oriel-cpu",)}


@pytest.mark.parametrize("file", ["kustomize/namespace.yaml", "flux/release.yaml"])
def test_namespaces_keep_pods_without_rights(file) -> None:
    labels = of_kind(file, "Namespace")["metadata"]["labels"]
    assert labels == {"pod-security.kubernetes.io/enforce": "restricted"}
