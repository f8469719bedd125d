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
import yaml

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
HEALTHY: Answers = yaml.safe_load(Path(__file__).with_name("cluster.yaml").read_text())


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
    assert doctor(deepcopy(HEALTHY)) == []


def at(place: str, value: Any) -> Change:
    """Return a change of the first object of an answer. place: the kind of question and the path, with slashes."""

    def change(answers: Answers) -> None:
        kind, *path, last = (int(step) if step.isdecimal() else step for step in place.split("/"))
        found: Any = answers[str(kind)][0]
        for step in path:
            found = found[step]
        found[last] = value

    return change


def old_logic(answers: Answers) -> None:
    answers["deployments"].append(deepcopy(answers["deployments"][0]))
    at("deployments/metadata/name", "logic")(answers)
    at(f"deployments/{ONE}/image", "registry.example/oriel-logic:0.9")(answers)


def restarted(answers: Answers) -> None:
    at(f"{STATUS}/restartCount", 3)(answers)
    at(f"{STATUS}/lastState", {"terminated": {"reason": "OOMKilled", "exitCode": 137}})(answers)


STATUS = "pods/status/containerStatuses/0"
ONE = "spec/template/spec/containers/0"
UNSCHEDULED = {"type": "PodScheduled", "status": "False", "message": "no room"}


@pytest.mark.parametrize(
    ("change", "status", "what"),
    [
        (at("namespaces/metadata/labels", {}), "warn", "enforces the pod security level none"),
        (at("deployments/status", {}), "fail", "gateway: 0 of 1 replicas"),
        (at("deployments/metadata/labels", {}), "fail", "there are none of Oriel in oriel"),
        (old_logic, "warn", "several versions run: 0.9: logic; 1.0.0: gateway"),
        (at(f"deployments/{ONE}/envFrom/0/secretRef/name", "away"), "fail", "the Secret away, which is not there"),
        (at(f"deployments/{ONE}/env/0/valueFrom/secretKeyRef/key", "k"), "fail", "the key k of the Secret oriel-keys"),
        (at("networkpolicies/spec/policyTypes", ["Ingress"]), "fail", "none denies what no other allows"),
        (at("daemonsets/metadata/name", "other"), "warn", "they may have no effect"),
        (at("scaledobjects/status/conditions/0/status", "False"), "fail", "ScaledObject logic is not ready: why"),
        (at("apiservices/spec/service/name", "datadog"), "fail", "belongs to keda/datadog"),
        (at("apiservices/status/conditions/0/status", "False"), "fail", "is not available"),
        (at(f"deployments.apps/{ONE}/image", "keda:v2.9.0"), "fail", "its version is v2.9.0"),
        (at("endpointslices/endpoints/0/conditions/ready", False), "fail", "none that is ready"),
        (at(f"{STATUS}/state", {"waiting": {"reason": "CrashLoopBackOff"}}), "fail", "waits: CrashLoopBackOff"),
        (restarted, "warn", "restarted 3 times, last: OOMKilled, exit code 137"),
        (at("pods/status/conditions/0", UNSCHEDULED), "fail", "gateway-1 is not scheduled: no room"),
        (at("nodes/status/allocatable", {}), "warn", "no node offers nvidia.com/gpu, for which gateway asks"),
    ],
)
def test_each_fault_is_named_with_its_remedy(doctor: Any, change: Change, status: str, what: str) -> None:
    answers = deepcopy(HEALTHY)
    change(answers)
    (found,) = doctor(answers)
    assert found["status"] == status and what in found["what"] and found["fix"]


def test_certificates_are_judged_and_what_may_not_be_read_is_named(doctor: Any) -> None:
    answers = deepcopy(HEALTHY)
    del answers["nodes"], answers["networkpolicies"]
    found = {each["check"]: each for each in doctor(answers, days=5)}
    assert (found["nodes"]["status"], found["networkpolicies"]["status"]) == ("warn", "fail")
    assert "expires on" in found["certificate"]["what"]
    assert "Forbidden" in found["nodes"]["what"] and "can-i list networkpolicies" in found["networkpolicies"]["fix"]


def test_of_many_pods_that_fail_alike_some_are_named_and_the_others_counted(doctor: Any) -> None:
    answers = deepcopy(HEALTHY)
    restarted(answers)
    answers["pods"] = [deepcopy(answers["pods"][0]) for _ in range(300)]
    *some, last = doctor(answers)
    assert len(some) == 20 and "280 more findings" in last["what"] and last["fix"] == "kubectl -n oriel get pods"


def test_a_wrong_namespace_and_a_missing_kubectl_are_explained(
    doctor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kubectl").write_text("#!/bin/sh\necho 'Error from server (NotFound): no' >&2\nexit 1\n")
    assert main(["doctor", "--cluster", "elsewhere"]) == 1
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["doctor", "--cluster"]) == 1
    told = capsys.readouterr()
    assert "there is none of the name elsewhere" in told.out and "there is no kubectl on PATH" in told.err
