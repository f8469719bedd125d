import json
from typing import Any

import httpx
from stacks import Stack, key, picture

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"


def sent(client: httpx.Client, **headers: str) -> str:
    fields = {**key("gold"), "content-type": "image/png", **headers}
    answer = client.post("/v1/services/digits", content=picture(7), headers=fields)
    assert answer.status_code == 200
    return answer.headers["x-request-id"]


def shown(stack: Stack, request_id: str) -> dict[str, Any]:
    done = stack.oriel("trace", request_id, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_one_trace_holds_all_units_below_the_clients_span(stack: Stack, client: httpx.Client) -> None:
    request_id = sent(client, traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01")
    trace = shown(stack, request_id)
    spans = {span["span_id"]: span for span in trace["spans"]}
    assert trace["trace_id"] == TRACE_ID
    assert {span["unit"] for span in spans.values()} == {"gateway", "logic", "inference"}
    (root,) = [span for span in spans.values() if span["parent_id"] not in spans]
    assert (root["name"], root["parent_id"]) == ("POST /v1/services/{service}", PARENT_ID)
    names = {(span["unit"], span["name"]) for span in spans.values()}
    assert {("gateway", "POST"), ("logic", "pre"), ("logic", "POST"), ("inference", "compute")} <= names
    assert ("inference", "POST /v2/models/{model}/infer") in names
    # A service graph is drawn from CLIENT spans whose child is another unit's SERVER span.
    for unit, caller in (("logic", "gateway"), ("inference", "logic")):
        served = next(s for s in spans.values() if s["unit"] == unit and s["name"].startswith("POST /"))
        client_span = spans[served["parent_id"]]
        assert (client_span["unit"], client_span["name"]) == (caller, "POST")
    first = {
        unit: min((s for s in spans.values() if s["unit"] == unit), key=lambda s: s["start_ns"])
        for unit in ("gateway", "logic", "inference")
    }
    assert all(span["attributes"]["oriel.request_id"] == request_id for span in first.values())


def test_a_trace_is_drawn_for_people(stack: Stack, client: httpx.Client) -> None:
    request_id = sent(client)
    done = stack.oriel("trace", request_id)
    lines = done.stdout.splitlines()
    assert lines[0] == f"request {request_id}" and "tier gold" in lines[1] and "tenant acme" in lines[1]
    assert any(line.lstrip().startswith("compute ") for line in lines)
    assert max(map(len, lines)) <= 100


def test_a_client_that_does_not_sample_is_not_traced(stack: Stack, client: httpx.Client) -> None:
    request_id = sent(client, traceparent=f"00-{TRACE_ID}-{PARENT_ID}-00")
    assert stack.oriel("trace", request_id).returncode == 1


def test_an_unknown_request_is_one_line(stack: Stack) -> None:
    done = stack.oriel("trace", "nobody")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "no trace with this request id" in done.stderr
