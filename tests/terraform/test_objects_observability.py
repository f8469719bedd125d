"""Monitors find their ports, dashboards and rules name metrics that exist, the collector's configuration is whole."""

import ast
import importlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from oriel_cli.arguments import Parser
from oriel_cli.main import COMMANDS
from oriel_cli.up.plan import PORTS as UNIT_PORTS
from oriel_wire.observe.otel_settings import resource_of

from . import objects
from .promtool import promtool

ROOT = Path(__file__).parents[2]
RUNBOOKS = (ROOT / "docs/runbooks.md").read_text()
UNITS = ("gateway", "logic", "inference")
# Prometheus and the operator put these on what they read from a pod.
TARGET_LABELS = {"pod", "namespace", "container", "job", "instance", "endpoint"}


@cache
def documented() -> dict[str, tuple[str, frozenset[str]]]:
    """Name -> (type, labels), from docs/metrics*.md, whose tables the units' tests hold against what is exposed."""
    found = {}
    for page in ROOT.glob("docs/metrics*.md"):
        rows = [
            [cell.strip() for cell in line.split("|")] for line in page.read_text().splitlines() if line.startswith("|")
        ]
        header: list[str] = []
        for row in rows:
            if "labels" in row:
                header = row
            elif header and len(row) > header.index("labels") and re.fullmatch(r"`\w+`", row[1]):
                found[row[1].strip("`")] = (row[2], frozenset(re.findall(r"`(\w+)`", row[header.index("labels")])))
            elif not row[1].startswith("-") and not row[1].startswith("`"):
                header = []
    return found


@cache
def literals() -> frozenset[str]:
    """Every text constant of the units' code."""
    nodes = [
        node
        for unit in (*UNITS, "wire", "policies")
        for file in (ROOT / unit).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
    ]
    return frozenset(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def exposed(name: str) -> str | None:
    """Return the documented family that a series belongs to and that the code names; None if there is none."""
    for family in (name, re.sub(r"_(bucket|sum|count)$", "", name)):
        if family in documented() and {family, family.removesuffix("_total")} & literals():
            return family
    return None


def metrics(expression: str) -> set[str]:
    without_text = re.sub(r'"[^"]*"', "", expression)
    return set(re.findall(r"(?<![:\w])(?:oriel|nv)_\w+(?![:\w])", without_text))


def labels(expression: str) -> set[str]:
    """Labels that are asked for or matched."""
    grouped = [each for names in re.findall(r"(?:by|on) \(([^)]*)\)", expression) for each in names.split(",")]
    return {each.strip() for each in grouped} - {"le", ""} | set(
        re.findall(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)", expression)
    )


def dashboards(found: list[objects.Object]) -> dict[str, dict[str, Any]]:
    maps = {name: each for name, each in objects.of(found, "ConfigMap").items() if name.startswith("dashboard-")}
    for each in maps.values():
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
    return {file: json.loads(text) for each in maps.values() for file, text in each["data"].items()}


def panels_of(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions(found: list[objects.Object]) -> list[str]:
    panels = [panel for board in dashboards(found).values() for panel in panels_of(board)]
    rules = [
        rule
        for each in objects.of(found, "PrometheusRule").values()
        for group in each["spec"]["groups"]
        for rule in group["rules"]
    ]
    return [target["expr"] for panel in panels for target in panel["targets"]] + [rule["expr"] for rule in rules]


@pytest.fixture(scope="module")
def found(shared) -> list[objects.Object]:
    return objects.at(shared, True, True, False)


def test_every_metric_that_is_named_is_exposed(found) -> None:
    assert len(documented()) > 80
    named = expressions(found)
    assert len(named) > 70
    for expression in named:
        for name in metrics(expression):
            assert exposed(name), f"{name} of {expression}"
    assert (
        exposed("oriel_gateway_waiting_total") is None
        and exposed("oriel_gateway_request_duration_seconds_total") is None
    )


def test_every_label_that_is_asked_for_is_one_of_the_metrics(found) -> None:
    for expression in expressions(found):
        families = [exposed(name) for name in metrics(expression)]
        known = set().union(*(documented()[each][1] for each in families if each)) | TARGET_LABELS
        known |= set(re.findall(r'"(\w+)", "\$1"', expression))  # made by label_replace
        if families:
            assert labels(expression) <= known, f"{labels(expression) - known} in {expression}"


def test_counters_are_read_as_rates_and_gauges_are_not(found) -> None:
    for expression in expressions(found):
        for name in metrics(expression):
            kind = documented()[exposed(name) or ""][0]
            rated = bool(re.search(rf"(?:rate|increase)\({name}\b", expression))
            assert rated == (kind in ("counter", "histogram")), f"{name} ({kind}) in {expression}"


def test_dashboards_are_what_grafana_takes(found) -> None:
    boards = dashboards(found)
    assert set(boards) == {f"oriel-{unit}.json" for unit in UNITS}
    assert len({board["uid"] for board in boards.values()}) == len(UNITS)
    for name, board in boards.items():
        assert board["title"] and board["schemaVersion"] >= 39 and len(panels_of(board)) >= 10, name
        assert [panel["id"] for panel in board["panels"]] == list(range(1, len(board["panels"]) + 1))
        places = [tuple(panel["gridPos"][each] for each in "yxwh") for panel in board["panels"]]
        assert places == sorted(set(places)) and all(x + width <= 24 for _, x, width, _ in places)
        for panel in panels_of(board):
            assert panel["datasource"]["uid"] == "${datasource}"
            assert re.search(r"Worry .*\. Do: .*\.$", panel["description"]), panel["title"]
            refs = [target["refId"] for target in panel["targets"]]
            assert refs and len(set(refs)) == len(refs)
            for target in panel["targets"]:
                shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                assert shown <= labels(target["expr"]) | {"le"}, target


def test_links_and_filters_of_dashboards_name_variables_and_labels_that_are_there(found) -> None:
    boards = {board["uid"]: board for board in dashboards(found).values()}
    variables = {uid: {each["name"] for each in board["templating"]["list"]} for uid, board in boards.items()}
    assert {"datasource", "tenant", "tier", "pool", "model", "pod"} <= variables["oriel-gateway"]
    for uid, board in boards.items():
        assert board["links"][0]["includeVars"] and board["links"][0]["keepTime"]
        for panel in panels_of(board):
            config = panel["fieldConfig"]
            asked = set().union(*(labels(target["expr"]) for target in panel["targets"]))
            used = set(re.findall(r"\$(\w+)", "".join(target["expr"] for target in panel["targets"])))
            assert {each for each in used if not each.isdigit()} <= variables[uid] | {"__rate_interval"}, panel["title"]
            overridden = [each["value"] for one in config["overrides"] for each in one["properties"]]
            traces = [link for value in overridden if isinstance(value, list) for link in value]
            assert {link["url"] for link in traces} <= {"${traces}${__value.raw}"}
            assert bool(traces) == any("exemplar" in target for target in panel["targets"]), panel["title"]
            for link in [*panel.get("links", []), *config["defaults"].get("links", [])]:
                other, query = link["url"].removeprefix("/d/").split("?")
                assert set(re.findall(r"var-(\w+)=", query)) <= variables[other], link
                assert set(re.findall(r"labels\.(\w+)", query)) <= asked, link
                assert query.endswith("${datasource:queryparam}&${__url_time_range}")


def test_dashboards_are_written_as_json_tool_writes_them(tree) -> None:
    """So that a change is a few lines in a diff: `python -m json.tool --indent 2 --no-ensure-ascii`."""
    for file in (tree.parent / "deploy/chart/monitoring/dashboards").iterdir():
        text = file.read_text()
        assert text == json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n", file


def test_without_dashboards_there_are_none(shared) -> None:
    found = objects.objects(shared, observability={"dashboards": False})
    assert not dashboards(found)
    assert not {"ServiceMonitor", "PrometheusRule"} & {each["kind"] for each in found}
    assert "collector" not in objects.pods(found)


def test_the_objects_are_the_plain_files(found, tree) -> None:
    files = tree.parent / "deploy/chart/monitoring"
    (rule,) = objects.of(found, "PrometheusRule").values()
    assert rule["spec"] == yaml.safe_load((files / "alerts.yaml").read_text())
    plain = {f"oriel-{file.name}": json.loads(file.read_text()) for file in (files / "dashboards").iterdir()}
    assert dashboards(found) == plain


def alerts(tree: Path) -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load((tree.parent / "deploy/chart/monitoring/alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


HOUR, DAY = 3600, 24 * 3600
ENDS = "oriel_gateway_certificate_expires_timestamp_seconds"
SPENT = 'oriel_gateway_budget_spent_ratio{tenant="reed", budget="budget-EUR-month"}'
UNWRITTEN = 'oriel_usage_ledger_failures_total{pod="g-0", what="write"}'
LOST = 'oriel_usage_ledger_lost_total{what="lines"}'
DRIFT = 'oriel_model_drift_psi{model="digits", version="2", tensor="x"}'
# Alert -> a series, and a value of it in which the alert fires, at hour 20; "0+1" is a counter that grows.
FIRES = {
    "OrielNoUsableEndpoint": ('oriel_gateway_endpoints_usable{pool="inference"}', 0),
    "OrielModelUnavailable": ('oriel_model_unavailable{model="digits"}', 1),
    "OrielModelFallback": ('oriel_model_fallback{model="digits", version="2", newest="3"}', 1),
    "OrielModelDrift": (DRIFT, 0.4),
    "OrielCanaryRolledBack": ('oriel_gateway_canary_rolled_back{route="digits", side="canary@8", reason="errors"}', 1),
    "OrielModelStoreAway": ('oriel_model_store_up{repository="s3://models"}', 0),
    "OrielColdStartHangs": ('oriel_gateway_scaling_held{pool="cold"}', 3),
    "OrielServiceBroken": ('oriel_logic_releases{state="failed"}', 1),
    "OrielTenantBudgetWarning": (SPENT, 1.25),
    "OrielTenantBudgetSpent": (SPENT, 1.25),
    "OrielUsageNotWritten": (UNWRITTEN, "0+1"),
    "OrielUsageLost": (LOST, "0+1"),
    "OrielLimiterAway": ("oriel_gateway_limiter_up", 0),
    "OrielPolicyStoreAway": ("oriel_gateway_policy_store_up", 0),
    "OrielPolicyStoreUnconfirmed": ("oriel_gateway_policy_store_confirmed_timestamp_seconds", 0),
    "OrielCertificateExpires": (ENDS, 2 * DAY),
    "OrielCertificateExpiresNow": (ENDS, 2 * DAY),
}
# What the values of other series are compared with.
BESIDE = {
    SPENT.replace("spent_ratio", "warn_ratio"): 0.8,
    SPENT.replace("spent_ratio", "stops"): 1,
    DRIFT.replace("psi", "noise"): 0.1,
}
# The same series while all is well.
QUIET = {
    SPENT: 0.79,
    DRIFT: 0.3,  # with a noise of 0.1
    UNWRITTEN: 7,  # of last night
    LOST: 7,
    'oriel_gateway_endpoints_usable{pool="inference"}': 1,
    'oriel_gateway_endpoints_usable{pool="idle"}': 0,
    'oriel_gateway_scaling_active{pool="idle"}': 0,
    'oriel_model_store_up{repository="s3://models"}': 1,
    'oriel_gateway_scaling_held{pool="inference"}': 3,
    'oriel_logic_releases{state="failed"}': 0,
    "oriel_gateway_limiter_up": 1,
    "oriel_gateway_policy_store_up": 1,
    "oriel_gateway_policy_store_confirmed_timestamp_seconds": 19 * HOUR,
    ENDS: 30 * DAY,
}


def test_each_thing_that_stops_callers_has_an_alert_and_a_runbook(tree) -> None:
    found = alerts(tree)
    for name, (series, _) in FIRES.items():
        assert series.partition("{")[0] in metrics(found[name]["expr"]), name
    sections = dict(part.split("\n", 1) for part in RUNBOOKS.split("\n## ")[1:])
    assert sections.keys() == found.keys()
    for name, rule in found.items():
        assert sections[name].strip().startswith(f"{rule['labels']['severity'].capitalize()}. "), name
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{name.lower()}"
        assert all(f"\n- {part}: " in sections[name] for part in ("First", "Causes", "Then")), name


@pytest.mark.parametrize("line", sorted(set(re.findall(r"`oriel ([^`]+)`", RUNBOOKS))))
def test_every_command_of_the_runbooks_parses(line: str) -> None:
    words = line.split()
    command = importlib.import_module(COMMANDS[words[0]].module)
    parser = Parser()
    command.add_arguments(parser)
    parser.parse_args(words[1:])


def test_promtool_sees_each_alert_fire_and_keep_quiet(tree, tmp_path: Path) -> None:
    rules = [each for each in alerts(tree).values() if each["alert"] in FIRES]
    cases = [
        {
            "interval": "5m",
            "input_series": [{"series": name, "values": f"{value}x240"} for name, value in (BESIDE | series).items()],
            "alert_rule_test": [
                {"alertname": rule["alert"], "eval_time": "20h", "exp_alerts": [expected(rule, series)] * fires}
                for rule in rules
                for fires in [rule["alert"] in firing]
            ],
        }
        for series, firing in (
            (dict(FIRES.values()), set(FIRES)),
            (QUIET, set()),
            (QUIET | {ENDS: 12 * DAY}, {"OrielCertificateExpires"}),
            (QUIET | {ENDS: 20 * HOUR - 38}, {"OrielCertificateExpires", "OrielCertificateExpiresNow"}),
            (QUIET | {SPENT: 0.8}, {"OrielTenantBudgetWarning"}),
            (QUIET | {SPENT: 1.25, SPENT.replace("spent_ratio", "stops"): 0}, {"OrielTenantBudgetWarning"}),
        )
    ]
    # Without the recording rules over three days, which cost promtool minutes.
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump({"groups": [{"name": "some", "rules": rules}]}))
    plan = {"rule_files": ["alerts.yaml"], "evaluation_interval": "5m", "tests": cases}
    (tmp_path / "test.yaml").write_text(json.dumps(plan))
    promtool("test", "rules", "test.yaml", cwd=tmp_path)


def test_a_server_that_comes_and_goes_is_a_ticket_until_it_stays(tree, tmp_path: Path) -> None:
    rule = alerts(tree)["OrielServersComeAndGo"]
    series = [{"series": 'oriel_gateway_endpoints_usable{pool="p"}', "values": "2 1 2 1 2 1 2x24"}]
    summary = "Servers of pool p come and go: 6 changes in 5 minutes; oriel top names them."
    said = {"summary": summary, "runbook_url": "docs/runbooks.md#orielserverscomeandgo"}
    fires = {"exp_labels": {"pool": "p", "severity": "ticket"}, "exp_annotations": said}
    times = [
        {"alertname": rule["alert"], "eval_time": at, "exp_alerts": found}
        for at, found in (("1m15s", []), ("1m30s", [fires]), ("7m", []))
    ]
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [rule]}]}))
    test = {"interval": "15s", "input_series": series, "alert_rule_test": times}
    plan = {"rule_files": ["alerts.yaml"], "evaluation_interval": "15s", "tests": [test]}
    (tmp_path / "test.yaml").write_text(json.dumps(plan))
    promtool("test", "rules", "test.yaml", cwd=tmp_path)


def expected(rule: dict[str, Any], series: dict[str, Any]) -> dict[str, Any]:
    """The alert that promtool expects: labels of the expression and the rule, the summary filled in."""
    name = FIRES[rule["alert"]][0]
    kept = {each.strip() for names in re.findall(r"by \(([^)]*)\)", rule["expr"]) for each in names.split(",")}
    own = {label: text for label, text in re.findall(r'(\w+)="([^"]*)"', name) if label in kept}
    summary = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: own[match[1]], rule["annotations"]["summary"])
    value = series.get(name, 0)
    value = 0 if isinstance(value, str) else value  # no summary says how fast something grows
    days, hours = divmod(int(value - 20 * HOUR) // HOUR, 24)
    expired = "has expired, and callers cannot connect"
    left = f"expires in {days}d {hours}h 0m 0s" if value > 20 * HOUR else expired
    summary = re.sub(r"\{\{ if gt \$value 0\.0 .*?\{\{ end \}\}", left, summary)
    summary = summary.replace("{{ $value | humanizePercentage }}", f"{value * 100:.4g}%")
    return {"exp_labels": own | rule["labels"], "exp_annotations": rule["annotations"] | {"summary": summary}}


def test_the_scrape_configuration_reads_each_units_own_port(tree) -> None:
    config = yaml.safe_load((tree.parent / "deploy/chart/monitoring/prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yaml"]
    ports = {"gateway": UNIT_PORTS["gateway"]["admin"], "logic": UNIT_PORTS["logic"]["admin"]}
    ports["inference"] = UNIT_PORTS["inference"]["metrics"]
    found = {each["job_name"].removeprefix("oriel-"): each for each in config["scrape_configs"]}
    for unit, each in found.items():
        assert each["static_configs"] == [{"targets": [f"127.0.0.1:{ports[unit]}"]}]
        # The dashboards tell servers apart by it.
        assert each["relabel_configs"] == [{"source_labels": ["__address__"], "target_label": "pod"}]
    assert set(found) == set(UNITS)


def test_every_monitor_finds_each_pod_once(found) -> None:
    """A monitor takes the ports of that name of all Services it selects: a pod behind two would count twice."""
    services, templates = objects.of(found, "Service").values(), objects.pods(found)
    monitors = objects.of(found, "ServiceMonitor")
    assert set(monitors) == {*UNITS, "collector"}
    seen: list[str] = []
    for monitor in monitors.values():
        (endpoint,) = monitor["spec"]["endpoints"]
        for service in services:
            if not objects.matches(monitor["spec"]["selector"]["matchLabels"], service["metadata"]["labels"]):
                continue
            for port in service["spec"]["ports"]:
                if port["name"] != endpoint["port"]:
                    continue
                for name, template in templates.items():
                    if objects.matches(service["spec"]["selector"], template["metadata"]["labels"]):
                        ports = {each["containerPort"] for each in template["spec"]["containers"][0]["ports"]}
                        assert port["targetPort"] in ports, name
                        seen.append(name)
    assert sorted(seen) == ["collector", "gateway", "inference-cpu", "inference-gpu", "logic"]


def test_no_label_of_ours_is_renamed_by_the_operators(found) -> None:
    ours = set().union(*(each for _, each in documented().values()))
    assert "service" in ours and not ours & TARGET_LABELS
    for monitor in objects.of(found, "ServiceMonitor").values():
        assert {"action": "labeldrop", "regex": "service"} in monitor["spec"]["endpoints"][0]["relabelings"]


def test_promtool_reads_every_expression(found, tmp_path: Path) -> None:
    rules = [
        {"record": f"test:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, expression in enumerate(expressions(found))
    ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    promtool("check", "rules", "rules.yaml", cwd=tmp_path)


# --- the collector --------------------------------------------------------------------------------------------------

POD_FIELDS = {
    "k8s.namespace.name": "metadata.namespace",
    "k8s.pod.name": "metadata.name",
    "k8s.pod.uid": "metadata.uid",
    "k8s.node.name": "spec.nodeName",
}


def container_env(template: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = template["spec"]["containers"][0].get("env", [])
    return found


def collector(found: list[objects.Object]) -> tuple[dict[str, Any], dict[str, Any]]:
    config = yaml.safe_load(objects.of(found, "ConfigMap")["collector"]["data"]["config.yaml"])
    return config, objects.pods(found)["collector"]["spec"]["containers"][0]


@pytest.mark.parametrize("tail", ["gateway", "collector"])
def test_the_collectors_configuration_holds_together(shared, tail: str) -> None:
    secret = {"endpoint": "https://otlp.example/v1", "authorization_secret_ref": {"name": "otlp", "key": "token"}}
    secret["trace_tail"] = tail
    config, container = collector(objects.objects(shared, observability={"otlp": secret}))
    assert set(config) == {"receivers", "processors", "exporters", "extensions", "service"}
    (pipeline,) = config["service"]["pipelines"].values()
    for section in ("receivers", "processors", "exporters"):
        assert set(pipeline[section]) == set(config[section]), "defined is used, used is defined"
    assert pipeline["processors"][0] == "memory_limiter"
    assert config["service"]["extensions"] == list(config["extensions"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert config["receivers"]["otlp"]["protocols"]["http"]["endpoint"] == f"0.0.0.0:{ports['otlp-http']}"
    assert config["extensions"]["health_check"]["endpoint"] == f"0.0.0.0:{ports['health']}"
    (reader,) = config["service"]["telemetry"]["metrics"]["readers"]
    assert reader["pull"]["exporter"]["prometheus"]["port"] == ports["metrics"]
    used = set(re.findall(r"\$\{env:(\w+)\}", json.dumps(config)))
    assert used == {each["name"] for each in container["env"]} == {"OTLP_AUTHORIZATION"}
    assert container["env"][0]["valueFrom"] == {"secretKeyRef": {"name": "otlp", "key": "token"}}


def test_a_collector_that_chooses_gets_all_spans_and_the_documented_policy(shared, found) -> None:
    chosen = objects.objects(
        shared, observability={"otlp": {"endpoint": "https://a.example", "trace_tail": "collector"}}
    )
    config, container = collector(chosen)
    page = (ROOT / "docs/tracing.md").read_text().partition("## With a collector of your own")[2]
    documented_policy = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])["processors"]["tail_sampling"]
    assert config["processors"]["tail_sampling"] == documented_policy
    assert config["service"]["pipelines"]["traces"]["processors"] == ["memory_limiter", "tail_sampling", "batch"]
    assert "/opentelemetry-collector-contrib:" in container["image"], "only that distribution has the processor"
    assert container["resources"]["limits"]["memory"] == "2Gi"
    (gateway,) = objects.pods(chosen)["gateway"]["spec"]["containers"]
    assert gateway["args"][gateway["args"].index("--trace-tail") + 1] == "collector"
    # Without it nothing of that.
    config, container = collector(found)
    assert "tail_sampling" not in config["processors"] and "/opentelemetry-collector:" in container["image"]
    (gateway,) = objects.pods(found)["gateway"]["spec"]["containers"]
    assert "--trace-tail" not in gateway["args"]


def test_a_collector_decides_after_the_last_span_of_the_longest_call_has_come(tree) -> None:
    variables = (tree / "modules/platform/variables.tf").read_text()
    (waits,) = re.findall(r"decision_wait_s = optional\(number, (\d+)\)", variables)
    give_up_ms = re.findall(r"give_up_ms = (\d+)", (tree.parent / "deploy/chart/templates/policies.yaml").read_text())
    assert int(waits) >= max(map(int, give_up_ms)) / 1000 + 2


def test_a_new_configuration_is_a_new_pod(shared) -> None:
    marks = [
        objects.pods(objects.objects(shared, observability={"otlp": {"endpoint": endpoint}}))["collector"]["metadata"][
            "annotations"
        ]
        for endpoint in ("https://a.example", "https://b.example")
    ]
    assert marks[0] != marks[1]


def test_the_units_are_told_the_collectors_address_and_only_then(shared, found) -> None:
    services = objects.of(found, "Service")
    for name, template in objects.pods(found).items():
        env = {each["name"]: each.get("value") for each in template["spec"]["containers"][0].get("env", [])}
        if name.split("-")[0] not in UNITS:
            assert "OTEL_EXPORTER_OTLP_ENDPOINT" not in env
            continue
        address = re.fullmatch(r"http://([a-z]+)\.oriel\.svc\.cluster\.local:(\d+)", env["OTEL_EXPORTER_OTLP_ENDPOINT"])
        assert address and int(address[2]) in [port["port"] for port in services[address[1]]["spec"]["ports"]]
        assert float(env["OTEL_TRACES_SAMPLER_ARG"]) == 0.01
        # Kubernetes expands a variable only from those that stand before it.
        before = list(env)[: list(env).index("OTEL_RESOURCE_ATTRIBUTES")]
        described = resource_of("gateway", {key: value for key, value in env.items() if value})
        fields = {each["name"]: each["valueFrom"] for each in container_env(template) if each["name"] in before[-4:]}
        for key, path in POD_FIELDS.items():
            (variable,) = re.findall(r"\$\((\w+)\)", described[key])
            assert fields[variable] == {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}
    for template in objects.pods(objects.objects(shared)).values():
        names = {each["name"] for each in template["spec"]["containers"][0].get("env", [])}
        assert not [name for name in names if name.startswith("OTEL_")]
