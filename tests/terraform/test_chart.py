"""The carrier chart: its five lines, their meaning, and the order in which releases use it."""

import json
import re
from typing import Any

import pytest
import yaml

from . import objects

TEMPLATE = "modules/platform/chart/templates/objects.yaml"
NASTY = [
    {"kind": "ConfigMap", "data": {"a": "x\n---\nkind: Secret\n", "b": "{{ .Values.objects }} {{- end }}"}},
    {"kind": "Numbers", "n": [0, -1, 1000000, 100000, 2**53 - 1, 0.5], "yes": "yes", "no": "no", "octal": "0777"},
    {"kind": "Text", "t": '<a href="x">&amp;</a> \\ \' \u2028 ü 模型 # : - % @ ` | > ~ null true 1e3\t', "e": ""},
    {"kind": "Empty", "list": [], "map": {}, "nested": [[], [{}]], "true": True, "false": False, "null": None},
]


def rendered(template: str, found: list[Any]) -> str:
    """What Go's text/template makes of the comment and the actions the chart consists of, and of no others."""
    tokens = re.split(r"(\{\{.*?\}\})", template, flags=re.S)
    for number, token in enumerate(tokens):
        if token.startswith("{{-"):
            tokens[number - 1] = tokens[number - 1].rstrip(" \t\r\n")
        if token.endswith("-}}"):
            tokens[number + 1] = tokens[number + 1].lstrip(" \t\r\n")
    words = [re.sub(r"^\{\{-?\s*|\s*-?\}\}$", "", token) if token.startswith("{{") else None for token in tokens]
    start, stop = words.index("range .Values.objects"), words.index("end")

    def part(numbers: range, dot: Any) -> str:
        written = ""
        for number in numbers:
            if words[number] is None:
                written += tokens[number]
            elif words[number] == "toJson .":
                written += go_json(dot)
            else:
                assert words[number].startswith("/*"), f"not known here: {tokens[number]}"
        return written

    inner = "".join(part(range(start + 1, stop), each) for each in found)
    return part(range(start), None) + inner + part(range(stop + 1, len(tokens)), None)


def go_json(value: Any) -> str:
    """encoding/json's Marshal, which toJson is: keys sorted, one line, <, > and & escaped."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def documents(text: str) -> list[Any]:
    """As Helm takes a rendered template apart: its own pattern, empty ones dropped, each read as YAML."""
    return [yaml.safe_load(each) for each in re.split(r"(?:^|\s*\n)---\s*", text) if each.strip()]


def test_it_is_five_lines_of_nothing_else(tree) -> None:
    lines = (tree / TEMPLATE).read_text().splitlines()
    assert len(lines) == 5 and max(map(len, lines)) <= 120
    assert {file.name for file in (tree / "modules/platform/chart").rglob("*") if file.is_file()} == {
        "Chart.yaml",
        "objects.yaml",
    }
    chart = yaml.safe_load((tree / "modules/platform/chart/Chart.yaml").read_text())
    assert chart["apiVersion"] == "v2" and re.fullmatch(r"\d+\.\d+\.\d+", chart["version"])


@pytest.mark.parametrize("found", [NASTY, NASTY[:1], []])
def test_out_comes_what_went_in(tree, found) -> None:
    assert documents(rendered((tree / TEMPLATE).read_text(), found)) == found


# --- the releases ---------------------------------------------------------------------------------------------------

ALL = {
    "nvidia_device_plugin": {"enabled": True},
    "metrics_server": {"enabled": True},
    "prometheus_operator_crds": {"enabled": True},
}


def given(**variables: Any) -> dict[str, Any]:
    images = {"registry": "registry.example/oriel", "tag": "0.1.0"}
    return {"infrastructure": objects.INFRASTRUCTURE, "images": images, **variables}


def order(calls: Any, action: str) -> list[str]:
    made = [call for call in calls if call.rpc == "ApplyResourceChange" and call.type == "helm_release"]
    return [call.address or call.id for call in made if call.action == action]


def test_releases_are_made_in_order_and_destroyed_the_other_way_round(workspace) -> None:
    one = workspace("modules/platform")
    variables = given(keda={"enabled": True}, model_groups=objects.NAMED, charts=ALL, observability=objects.WATCHED)
    one.apply(**variables)
    made = order(one.calls, "create")
    assert made[0] == "helm_release.namespace"
    assert {name.split('"')[1] for name in made[1:-1]} == {
        "keda",
        "nvidia-device-plugin",
        "metrics-server",
        "prometheus-operator-crds",
    }
    assert made[-1] == "helm_release.oriel"
    assert not one.plan(**variables).changes
    one.destroy(**variables)
    gone = [call.type for call in one.calls if call.action == "delete"]
    assert gone.count("helm_release") == len(made) and not one.state().resources()


def test_a_release_that_fails_is_rolled_back_and_models_have_the_time_they_need(shared) -> None:
    bounds = {"load_grace_s": 1800, "replicas": {"min": 1, "max": 8}}
    one = shared("modules/platform")
    for accelerator, pods_in_turn in (("cpu", 4), ("gpu", 8)):
        groups = {"slow": {"accelerator": accelerator, **bounds}}
        plan = one.plan(**given(keda={"enabled": True}, model_groups=groups))
        for address, release in plan.resources("helm_release").items():
            assert release["atomic"] and release["cleanup_on_fail"] and release["wait"], address
            assert release["timeout"] >= 300 and release["max_history"] == 10
        # A node, and then one pod after another, or a quarter of them at a time.
        assert plan.values("helm_release.oriel")["timeout"] >= 900 + pods_in_turn * 1800


def test_a_namespace_that_is_there_for_its_secrets_is_taken_over_and_left(shared) -> None:
    """docs/deploy.md: Secrets are put there before the first apply. No other release takes what is not its own."""
    plan = shared("modules/platform").plan(**given())
    taking = {address for address, each in plan.resources("helm_release").items() if each.get("take_ownership")}
    assert taking == {"helm_release.namespace"}
    annotations = {each["kind"]: each["metadata"].get("annotations", {}) for each in plan.objects()}
    kept = {kind: each for kind, each in annotations.items() if "helm.sh/resource-policy" in each}
    assert kept == {"Namespace": {"helm.sh/resource-policy": "keep"}}


def test_charts_of_others_are_pinned_and_there_only_when_asked_for(shared) -> None:
    one = shared("modules/platform")
    versions = {"keda": "2.18.1", "nvidia-device-plugin": "0.18.2", "metrics-server": "3.13.0"}
    charts = one.plan(
        **given(
            keda={"enabled": True},
            model_groups=objects.NAMED,
            charts=ALL | {"kube_prometheus_stack": {"enabled": True}},
        )
    )
    found = {each["name"]: each for each in charts.resources("helm_release").values() if each.get("repository")}
    assert set(found) == {*versions, "kube-prometheus-stack"}, "its own custom resources come with the whole stack"
    for name, release in found.items():
        assert re.fullmatch(r"\d+\.\d+\.\d+", release["version"]) and release["repository"].startswith("https://")
        assert release["version"] == versions.get(name, release["version"])
    values = json.loads(found["nvidia-device-plugin"]["values"][0])
    # The chart's own affinity asks for labels of node-feature-discovery, which is not there; null takes it away.
    assert values["affinity"] is None and values["nodeSelector"] == objects.INFRASTRUCTURE["gpu_node_selector"]
    assert values["tolerations"][0]["key"] == objects.INFRASTRUCTURE["gpu_taint"]["key"]
    assert json.loads(found["keda"]["values"][0])["watchNamespace"] == "oriel"
    few = one.plan(**given(gpu_enabled=False))
    assert set(few.resources("helm_release")) == {"helm_release.namespace", "helm_release.oriel"}
