"""Checks of an installation in Kubernetes, by `kubectl` where that works. They only read, and read no secret value."""

import base64
import json
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from oriel_cli.doctor.findings import Finding, fail, good, warn
from oriel_cli.doctor.machine import validity
from oriel_cli.errors import CommandFailed

Object = dict[str, Any]

ANSWER_S = 20.0
MOST = 20  # findings about pods: those of a large installation usually fail alike
OLDEST_KEDA = (2, 18)
GPU = "nvidia.com/gpu"
METRICS = "v1beta1.external.metrics.k8s.io"
LEVEL = "pod-security.kubernetes.io/enforce"
# DaemonSets whose pods enforce network policies.
ENFORCERS = ("calico-node", "cilium", "anetd", "antrea-agent", "azure-npm", "kube-router", "weave-net")
# Name and keys of each Secret, and no value.
KEYS = '{{range .items}}{{.metadata.name}}{{range $key, $value := .data}} {{$key}}{{end}}{{"\\n"}}{{end}}'
HERE = ("deployments", "pods", "networkpolicies", "endpointslices", "scaledobjects")
EVERYWHERE = "--all-namespaces"
QUESTIONS = {
    "nodes": (),
    "daemonsets": (EVERYWHERE,),
    "apiservices": (METRICS,),
    "deployments.apps": (EVERYWHERE, "--selector=app.kubernetes.io/name=keda-operator"),
}
# The answer of a cluster that does not know KEDA's kinds of objects.
ABSENT = ("NotFound", "doesn't have a resource type")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The answers of `kubectl`. namespace: of the installation; denied: question -> why it was not answered."""

    namespace: str
    denied: dict[str, str] = field(default_factory=dict)

    def ask(self, kind: str, *words: str) -> str:
        """Return what `kubectl get KIND WORDS` prints; "" if it fails, with the reason in `denied`."""
        command = ["kubectl", f"--request-timeout={ANSWER_S:.0f}s", "get", kind, *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=2 * ANSWER_S, check=False)
        except FileNotFoundError:
            raise CommandFailed("there is no kubectl on PATH: install it, or run this where it is") from None
        except subprocess.TimeoutExpired:
            self.denied[kind] = f"no answer within {2 * ANSWER_S:.0f} s"
            return ""
        if done.returncode:
            self.denied[kind] = (done.stderr.strip().splitlines() or ["it failed"])[-1][:300]
        return "" if done.returncode else done.stdout

    def items(self, kind: str, words: Iterable[str]) -> list[Object]:
        """Return the objects that `kubectl get KIND WORDS` lists, one object as a list."""
        try:
            found: Object = json.loads(self.ask(kind, *words, "--output=json") or "{}")
        except ValueError:
            self.denied[kind] = "the answer is no JSON"
            return []
        return found["items"] if "items" in found else [found] * bool(found)


def examine(namespace: str) -> list[Finding]:
    """Run all checks of the installation in a namespace. Raises CommandFailed."""
    cluster, here = Cluster(namespace), f"--namespace={namespace}"
    questions = {"namespaces": (namespace,), **dict.fromkeys(HERE, (here,)), **QUESTIONS}
    with ThreadPoolExecutor(len(questions) + 1) as threads:
        keys = threads.submit(cluster.ask, "secrets", here, f"--output=go-template={KEYS}")
        answers = dict(zip(questions, threads.map(cluster.items, questions, questions.values()), strict=True))
        secrets = {name: set(held) for name, *held in map(str.split, keys.result().splitlines())}
    if "NotFound" in cluster.denied.get("namespaces", ""):
        fix = "pass --cluster NAMESPACE; 'kubectl config current-context' names the cluster"
        return [fail("namespace", f"there is none of the name {namespace} in this cluster", fix)]
    ours = [each for each in answers["deployments"] if _labels(each).get("app.kubernetes.io/part-of") == "oriel"]
    certified = sorted(name for name, held in secrets.items() if "tls.crt" in held)
    scaled, apis, operators = (answers[kind] for kind in ("scaledobjects", "apiservices", "deployments.apps"))
    # what a check has to have read -> its findings, made when they are wanted
    checks = {
        ("namespaces",): _namespace(answers["namespaces"]),
        ("deployments",): _deployments(ours, namespace),
        ("pods",): _some(_pods(answers["pods"], namespace), namespace),
        ("deployments", "secrets"): _secrets(ours, secrets),
        ("secrets",): _certificates(cluster, certified),
        ("networkpolicies",): _policies(answers["networkpolicies"]),
        ("daemonsets",): _enforcement(answers["daemonsets"]),
        ("endpointslices",): _endpoints(answers["endpointslices"]),
        ("scaledobjects", "apiservices", "deployments.apps"): _keda(scaled, apis, operators),
        ("deployments", "nodes"): _gpus(ours, answers["nodes"]),
    }
    unread = {kind: why for kind, why in cluster.denied.items() if not any(text in why for text in ABSENT)}
    found = [each for kinds, check in checks.items() if not unread.keys() & {*kinds} for each in check]
    for kind, why in unread.items():
        fix = f"look at 'kubectl auth can-i list {kind}'"
        found.append((fail if kind in HERE else warn)(kind, f"could not be read: {why}", fix))
    return found


def _namespace(spaces: list[Object]) -> Iterator[Finding]:
    for each in spaces:
        name, level = each["metadata"]["name"], _labels(each).get(LEVEL, "none")
        if level == "restricted":
            yield good("namespace", f"{name} enforces the pod security level restricted")
        else:
            fix = f"kubectl label namespace {name} {LEVEL}=restricted"
            yield warn("namespace", f"{name} enforces the pod security level {level}; Oriel meets restricted", fix)


def _deployments(deployments: list[Object], namespace: str) -> Iterator[Finding]:
    if not deployments:
        yield fail("deployments", f"there are none of Oriel in {namespace}", "pass --cluster NAMESPACE, or install it")
    tags: dict[str, list[str]] = {}
    for each in deployments:
        name, wanted = each["metadata"]["name"], each["spec"].get("replicas", 1)
        ready = each.get("status", {}).get("readyReplicas", 0)
        fix = f"kubectl -n {namespace} describe deployment {name}"
        what = f"{name}: {ready} of {wanted} replicas are ready"
        yield good("deployments", what) if ready >= wanted else fail("deployments", what, fix)
        for image in (container["image"].partition("@")[0] for container in _containers(each)):
            if image.rpartition("/")[2].startswith("oriel-"):
                tags.setdefault(image.rpartition(":")[2], []).append(name)
    if len(tags) > 1:
        named = "; ".join(f"{tag}: {', '.join(names)}" for tag, names in sorted(tags.items()))
        yield warn("images", f"several versions run: {named}", "finish the upgrade, or roll it back")
    elif tags:
        yield good("images", f"all are of version {next(iter(tags))}")


def _pods(pods: list[Object], namespace: str) -> Iterator[Finding]:
    for pod in pods:
        name, status = pod["metadata"]["name"], pod.get("status", {})
        for each in status.get("conditions", ()):
            if each["type"] == "PodScheduled" and each["status"] == "False":
                fix = "add nodes, or lower what it asks for"
                yield fail("pods", f"{name} is not scheduled: {each.get('message', '')[:300]}", fix)
        for each in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
            waits = each["state"].get("waiting", {}).get("reason", "ContainerCreating")
            last = each.get("lastState", {}).get("terminated", {})
            fix = f"kubectl -n {namespace} logs {name} --container={each['name']} --previous"
            if waits not in ("ContainerCreating", "PodInitializing"):
                yield fail("pods", f"{name} waits: {waits} after {last.get('reason', 'no run')}", fix)
            elif each["restartCount"]:
                ended = f"{last.get('reason', 'unknown')}, exit code {last.get('exitCode', '?')}"
                yield warn("pods", f"{name} was restarted {each['restartCount']} times, last: {ended}", fix)


def _some(findings: Iterator[Finding], namespace: str) -> Iterator[Finding]:
    yield from islice(findings, MOST)
    if more := sum(1 for _ in findings):
        yield fail("pods", f"there are {more} more findings like these", f"kubectl -n {namespace} get pods")


def _secrets(deployments: list[Object], secrets: dict[str, set[str]]) -> Iterator[Finding]:
    """Check that each Secret that a Deployment names is there with its keys."""
    missing = []
    for each in deployments:
        for name, key in _references(each):
            if name not in secrets:
                missing.append(f"{each['metadata']['name']} needs the Secret {name}, which is not there")
            elif key and key not in secrets[name]:
                missing.append(f"{each['metadata']['name']} needs the key {key} of the Secret {name}, which has none")
    for what in dict.fromkeys(missing):
        yield fail("secrets", what, "create it in this namespace, or correct the value that names it")
    if not missing:
        yield good("secrets", "those that are named are there, with their keys")


def _references(deployment: Object) -> Iterator[tuple[str, str]]:
    """Return name and key of each Secret that has to be there; "" for any key."""
    for container in _containers(deployment):
        named = [each.get("valueFrom", {}).get("secretKeyRef") for each in container.get("env", ())]
        named += [each.get("secretRef") for each in container.get("envFrom", ())]
        for each in named:
            if each and not each.get("optional"):
                yield each["name"], each.get("key", "")
    for volume in deployment["spec"]["template"]["spec"].get("volumes", ()):
        secret = volume.get("secret")
        if secret and not secret.get("optional"):
            for item in secret.get("items", ({"key": ""},)):
                yield secret["secretName"], item["key"]


def _certificates(cluster: Cluster, names: Iterable[str]) -> Iterator[Finding]:
    from cryptography import x509

    for name in names:
        text = cluster.ask("secret", name, f"--namespace={cluster.namespace}", r"--output=jsonpath={.data.tls\.crt}")
        try:
            yield from validity(x509.load_pem_x509_certificates(base64.b64decode(text)))
        except ValueError:
            yield fail("certificate", f"tls.crt of the Secret {name} is no certificate in PEM", "put one there")


def _policies(policies: list[Object]) -> Iterator[Finding]:
    if any(each["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} for each in policies):
        yield good("network policies", f"there are {len(policies)}, and what none allows is denied")
    else:
        yield fail("network policies", "none denies what no other allows", "install the chart's default-deny")


def _enforcement(daemons: list[Object]) -> Iterator[Finding]:
    texts = {each["metadata"]["name"]: json.dumps(each["spec"]) for each in daemons}
    known = [name for name in texts if name in ENFORCERS or "enable-network-policy=true" in texts[name]]
    if known:
        yield good("network policies", f"enforced by {', '.join(sorted(known))}")
    else:
        fix = "install Calico or Cilium, or switch on your cloud's; ignore this if another plugin enforces them"
        yield warn("network policies", "nothing that is known to enforce them runs: they may have no effect", fix)


def _endpoints(slices: list[Object]) -> Iterator[Finding]:
    of_gateway = [each for each in slices if _labels(each).get("kubernetes.io/service-name") == "gateway"]
    endpoints = [each for found in of_gateway for each in found.get("endpoints") or ()]
    ready = sum(each.get("conditions", {}).get("ready", True) for each in endpoints)
    if ready:
        yield good("endpoints", f"the Service gateway has {ready} ready ones")
    else:
        yield fail("endpoints", "the Service gateway has none that is ready", "look at the gateway's pods")


def _keda(scaled: list[Object], apis: list[Object], operators: list[Object]) -> Iterator[Finding]:
    if not scaled:
        yield good("keda", "there are no ScaledObjects: servers are scaled by CPU, not from zero")
        return
    for each in scaled:
        name, ready = each["metadata"]["name"], _condition(each, "Ready")
        if ready.get("status") == "True":
            yield good("keda", f"ScaledObject {name} is ready")
        else:
            why = str(ready.get("message") or "it has no condition yet")[:300]
            yield fail("keda", f"ScaledObject {name} is not ready: {why}", "the log of keda-operator says more")
    owner = (apis[0]["spec"].get("service") if apis else None) or {}
    if "keda" not in owner.get("name", ""):
        by = f"belongs to {owner.get('namespace')}/{owner['name']}" if owner else "is not there"
        fix = "install KEDA; if another adapter has it, let KEDA have it, or scale by CPU (keda.enabled = false)"
        yield fail("keda", f"the API service {METRICS} {by}, so KEDA's metrics are not read", fix)
    elif (available := _condition(apis[0], "Available")).get("status") != "True":
        fix = "open port 6443 from the control plane to KEDA's metrics server, and look at its pods"
        yield fail("keda", f"{METRICS} is not available: {available.get('message', '')[:300]}", fix)
    else:
        yield good("keda", f"it has the API service {METRICS}")
    for each in operators:
        tag = _containers(each)[0]["image"].partition("@")[0].rpartition(":")[2]
        version = tag.removeprefix("v").split(".")[:2]
        if all(map(str.isdecimal, version)) and tuple(map(int, version)) < OLDEST_KEDA:
            yield fail("keda", f"its version is {tag}", "upgrade it to {}.{} or later".format(*OLDEST_KEDA))
        else:
            yield good("keda", f"its version is {tag}")


def _gpus(deployments: list[Object], nodes: list[Object]) -> Iterator[Finding]:
    asking = [
        each["metadata"]["name"]
        for each in deployments
        if any(GPU in container.get("resources", {}).get("limits", {}) for container in _containers(each))
    ]
    there = sum(int(each.get("status", {}).get("allocatable", {}).get(GPU, 0)) for each in nodes)
    if asking and there:
        yield good("gpus", f"nodes offer {there} {GPU}")
    elif asking:
        fix = "unless nodes are added on demand: install the device plugin, and look at the nodes with GPUs"
        yield warn("gpus", f"no node offers {GPU}, for which {', '.join(asking)} asks", fix)


def _containers(deployment: Object) -> list[Object]:
    containers: list[Object] = deployment["spec"]["template"]["spec"]["containers"]
    return containers


def _labels(each: Object) -> dict[str, str]:
    labels: dict[str, str] = each["metadata"].get("labels") or {}
    return labels


def _condition(each: Object, kind: str) -> Object:
    return next((one for one in each.get("status", {}).get("conditions", ()) if one["type"] == kind), {})
