"""Texts of every kind come out of the chart as data: none ends a line, is a template, or looks like an object."""

import pytest

from oriel_policies.documents import compile_documents

from .chart_values import PLAIN, anything, in_order, named, replaced, smallest
from .helm import rendered
from .objects import Object, of

NASTY = [
    "x\n---\nkind: Secret\n", "{{ .Values.keys }} {{- end }}", '<a href="x">&amp;</a> \\ \' \u2028 ü 模型', "x: {y: [",
    "\t# x", " x ", "-", "!x", "*x", "&x", "|", ">", "%x", "@x", "`x`", "~", "\ufeff", "yes", "0777", "1_000", "0x1f",
    "1e3", "12", "1.50", "null", "True", "2001-01-01", "x\r\ny", "$(ORIEL_STATE)", "a,b]}", '"', "'", "\\",
]  # fmt: skip
# Names as Kubernetes allows them, which YAML takes for something else.
NAMES = ["true", "null", "on", "n", "no", "123", "1e3", "0x1f", "2001-01-01", "0o17"]


@pytest.fixture(scope="module")
def plain() -> list[Object]:
    return rendered(anything(PLAIN))


@pytest.mark.parametrize("text", NASTY)
def test_any_text_is_data(plain, text) -> None:
    assert in_order(rendered(anything(text))) == in_order(replaced(plain, text))


@pytest.mark.parametrize("name", NAMES)
def test_any_name_stays_a_name(name) -> None:
    wanted = replaced(rendered(named(PLAIN), namespace=PLAIN), name)
    assert in_order(rendered(named(name), namespace=name)) == in_order(wanted)


def test_any_address_of_runbooks_is_data() -> None:
    url = "https://a/'b\"{{#:[&*"
    watched = {"service_monitors": True, "runbooks_url": url}
    (rule,) = of(rendered({**smallest(), "observability": watched}), "PrometheusRule").values()
    alerts = [each for group in rule["spec"]["groups"] for each in group["rules"] if "alert" in each]
    assert alerts and all(each["annotations"]["runbook_url"].startswith(f"{url}#") for each in alerts)


def test_any_path_and_pattern_are_data_of_the_documents() -> None:
    path = "/a\"b\\c'{{.}}[[routes]]#"
    engine = {"kind": "vllm", "image": "i", "command": ["c"], "health": path}
    pools = {"far": {"address": "a.b.svc", "port": 1, "services": ["s"], "probe": path}}
    values = {"keda": {"enabled": True}, "model_groups": {"own": {"accelerator": "cpu", "engine": engine}}}
    found = rendered(smallest() | values | {"policies": {"pools": pools}})
    data = of(found, "ConfigMap")["policies"]["data"]
    snapshot = compile_documents({name: text.encode() for name, text in data.items()})
    assert snapshot.pools["far"].probe == snapshot.pools["inference-own"].probe == path
    probes = next(
        each for each in found if each["metadata"]["name"] == "inference-own" and each["kind"] == "Deployment"
    )
    (container,) = probes["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == path
