"""`oriel doctor --cluster` against a stand-in for kubectl, which answers from files with the API's own objects."""

import base64
import json
import os
from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from oriel_cli.main import main

from .certificate_pair import pair

STAND_IN = """#!/bin/sh
echo "$*" >>"$ANSWERS/asked"
kind=$3
case "$*" in *jsonpath*) kind=certificate ;; esac
[ ! -f "$ANSWERS/$kind" ] || exec cat "$ANSWERS/$kind"
echo 'Error from server (Forbidden): no' >&2
exit 1
"""
# kind of the question -> objects of its answer
Answers = dict[str, list[dict[str, Any]]]
Change = Callable[[Answers], None]
CONTAINER = {
    "name": "gateway",
    "image": "registry.example/oriel-gateway:1.0.0@sha256:aa",
    "resources": {"limits": {"nvidia.com/gpu": "1"}},
    "env": [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "oriel-keys", "key": "admin"}}}],
    "envFrom": [{"secretRef": {"name": "store"}}],
}


def thing(api: str, kind: str, name: str, **more: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/part-of": "oriel", "kubernetes.io/service-name": "gateway"}
    labels["pod-security.kubernetes.io/enforce"] = "restricted"
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "namespace": "oriel", "labels": labels}, **more}


def workload(kind: str, name: str, container: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
    labels = {"a": name}
    volumes = [{"name": "tls", "secret": {"secretName": "public"}}, {"name": "tmp", "emptyDir": {}}]
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": volumes}}
    spec: dict[str, Any] = {"selector": {"matchLabels": labels}, "template": template}
    return thing("apps/v1", kind, name, spec=spec, status=status)


def healthy() -> Answers:
    nothing = {"currentNumberScheduled": 1, "desiredNumberScheduled": 1, "numberMisscheduled": 0, "numberReady": 1}
    running = {"name": "gateway", "ready": True, "restartCount": 0, "image": "i", "imageID": "i"}
    budget = {"disruptionsAllowed": 1, "currentHealthy": 2, "desiredHealthy": 1, "expectedPods": 2}
    scaled = {"scaleTargetRef": {"name": "logic"}, "triggers": [{"type": "external", "metadata": {}}]}
    owner = {"service": {"namespace": "keda", "name": "keda-operator-metrics-apiserver"}, "group": "g", "version": "v"}
    there = [{"type": "Available", "status": "True"}]
    endpoints = [{"addresses": ["10.0.0.1"], "conditions": {"ready": True}}]
    return {
        "namespaces": [thing("v1", "Namespace", "oriel")],
        "deployments": [workload("Deployment", "gateway", deepcopy(CONTAINER), {"readyReplicas": 1})],
        "pods": [thing("v1", "Pod", "g-1", spec={"containers": [{"name": "gateway"}]}, status={
            "conditions": [{"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [{**running, "state": {"running": {}}, "lastState": {}}],
        })],
        "networkpolicies": [thing("networking.k8s.io/v1", "NetworkPolicy", "deny", spec={
            "podSelector": {}, "policyTypes": ["Ingress", "Egress"]})],
        "endpointslices": [thing("discovery.k8s.io/v1", "EndpointSlice", "g", addressType="IPv4", endpoints=endpoints)],
        "poddisruptionbudgets": [thing("policy/v1", "PodDisruptionBudget", "gateway", status=budget)],
        "scaledobjects": [thing("keda.sh/v1alpha1", "ScaledObject", "logic", spec=scaled, status={
            "conditions": [{"type": "Ready", "status": "True", "reason": "r", "message": "m"}]})],
        "apiservices": [thing("apiregistration.k8s.io/v1", "APIService", "x", spec={
            **owner, "groupPriorityMinimum": 1, "versionPriority": 1}, status={"conditions": there})],
        "nodes": [thing("v1", "Node", "n", status={"allocatable": {"nvidia.com/gpu": "2"}})],
        "daemonsets": [workload("DaemonSet", "cilium", {"name": "c", "image": "cilium:1"}, nothing)],
        "deployments.apps": [workload("Deployment", "keda-operator", {"name": "k", "image": "keda:2.18.1"}, {})],
    }  # fmt: skip


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    (tmp_path / "kubectl").write_text(STAND_IN)
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("ANSWERS", str(tmp_path))

    def run(
        answers: Answers, keys: str = "oriel-keys admin\nstore a b\npublic tls.crt tls.key\n", days: int = 90
    ) -> Any:
        for kind, objects in answers.items():
            for each in objects:
                if "keda.sh" not in each["apiVersion"]:
                    kubernetes_validate.validate(each, "1.34", strict=True)
            listed = {"apiVersion": "v1", "kind": "List", "items": objects}
            (tmp_path / kind).write_text(json.dumps(objects[0] if kind in ("namespaces", "apiservices") else listed))
        (tmp_path / "secrets").write_text(keys)
        chain, _ = pair(tmp_path, begins=timedelta(days=-1), ends=timedelta(days=days))
        (tmp_path / "certificate").write_bytes(base64.b64encode(chain.read_bytes()))
        code = main(["doctor", "--cluster", "--json"])
        found = json.loads(capsys.readouterr().out)
        assert code == (not found["healthy"])
        assert "secrets" not in (tmp_path / "asked").read_text().replace("secrets --namespace=oriel --output=go", "")
        return [each for each in found["findings"] if each["status"] != "ok"]

    return run


def test_nothing_is_found_in_a_healthy_installation(doctor: Any) -> None:
    assert doctor(healthy()) == []


def at(place: str, value: Any) -> Change:
    """Return a change of the first object of an answer: `pods.status.x` names the kind and the place."""

    def change(answers: Answers) -> None:
        kind, *path, last = place.replace("deployments.apps", "deployments_apps").split(".")
        found: Any = answers[kind.replace("_", ".")][0]
        for step in path:
            found = found[int(step) if step.isdecimal() else step.replace("~", ".")]
        found[int(last) if last.isdecimal() else last.replace("~", ".")] = value

    return change


LAST = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
STATUS = "pods.status.containerStatuses.0"
ONE = "spec.template.spec.containers.0"


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        (at("namespaces.metadata.labels", {}), "warn", "enforces the pod security level none"),
        (at("deployments.status", {}), "fail", "gateway: 0 of 1 replicas"),
        (lambda them: them["deployments"].clear(), "fail", "there are none of Oriel in oriel"),
        (
            lambda them: them["deployments"].append(
                workload("Deployment", "logic", {"name": "l", "image": "r/oriel-logic:0.9"}, {"readyReplicas": 1})
            ),
            "warn",
            "several versions run: 0.9: logic; 1.0.0: gateway",
        ),
        (at(f"deployments.{ONE}.envFrom.0.secretRef.name", "away"), "fail", "the Secret away, which is not there"),
        (at(f"deployments.{ONE}.env.0.valueFrom.secretKeyRef.key", "k"), "fail", "the key k of the Secret oriel-keys"),
        (at("networkpolicies.spec.policyTypes", ["Ingress"]), "fail", "none denies what no other allows"),
        (lambda them: them["daemonsets"].clear(), "warn", "they may have no effect"),
        (at("scaledobjects.status.conditions.0.status", "False"), "fail", "ScaledObject logic is not ready: m"),
        (at("apiservices.spec.service.name", "datadog"), "fail", "belongs to keda/datadog"),
        (at("apiservices.status.conditions.0.status", "False"), "fail", "is not available"),
        (at(f"deployments.apps.{ONE}.image", "keda:v2.9.0"), "fail", "its version is v2.9.0"),
        (at("endpointslices.endpoints.0.conditions.ready", False), "fail", "none that is ready"),
        (at("poddisruptionbudgets.status.disruptionsAllowed", 0), "warn", "lets no pod go: 2 of 2"),
        (at(f"{STATUS}.state", {"waiting": {"reason": "CrashLoopBackOff"}}), "fail", "waits: CrashLoopBackOff"),
        (lambda them: [at(f"{STATUS}.{k}", v)(them) for k, v in (("restartCount", 3), ("lastState", LAST))],
         "warn", "restarted 3 times, last: OOMKilled, exit code 137"),
        (at("pods.status.conditions.0", {"type": "PodScheduled", "status": "False", "message": "no\x1b room"}),
         "fail", "g-1 is not scheduled: no\x1b room"),
        (at("nodes.status.allocatable", {}), "warn", "no node offers nvidia.com/gpu, for which gateway asks"),
    ],
)  # fmt: skip
def test_each_fault_is_named_with_its_remedy(doctor: Any, change: Change, status: str, said: str) -> None:
    answers = healthy()
    change(answers)
    (found,) = [each for each in doctor(answers) if each["check"] != "gpus" or "gpu" in said]
    assert found["status"] == status and said in found["what"] and found["fix"]


def test_certificates_are_judged_and_what_may_not_be_read_is_named(doctor: Any) -> None:
    answers = healthy()
    del answers["nodes"], answers["poddisruptionbudgets"]
    found = {each["check"]: each for each in doctor(answers, days=5)}
    assert (found["nodes"]["status"], found["poddisruptionbudgets"]["status"]) == ("warn", "fail")
    assert "expires on" in found["certificate"]["what"]
    assert (
        "Forbidden" in found["nodes"]["what"]
        and "can-i list poddisruptionbudgets" in found["poddisruptionbudgets"]["fix"]
    )


def test_a_wrong_namespace_and_a_missing_kubectl_are_explained(
    doctor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kubectl").write_text("#!/bin/sh\necho 'Error from server (NotFound): no' >&2\nexit 1\n")
    assert main(["doctor", "--cluster", "elsewhere"]) == 1
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["doctor", "--cluster"]) == 1
    told = capsys.readouterr()
    assert "there is none of the name elsewhere" in told.out and "there is no kubectl on PATH" in told.err
