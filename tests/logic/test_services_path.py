"""Whole requests through a unit: HTTP in, worker processes, an inference server on a socket, HTTP out."""

import asyncio
import os
import re
import threading
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from oriel_logic import app
from oriel_logic.workers.pool import WorkerPool
from oriel_wire.observe.trace import format_traceparent, new_trace, parse_traceparent

from ..waiting import until
from .callers import Connection, counted

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "examples" / "digits"
EXAMPLES = ROOT / "examples" / "services"


async def test_a_real_digit_is_read(stack: Any) -> None:
    logic = await stack(EXAMPLES)
    parent = new_trace(True)
    answer = await logic.post(
        "digits",
        (PICTURES / "7.png").read_bytes(),
        content_type="image/png",
        x_request_id="abc-1",
        traceparent=format_traceparent(parent),
        x_oriel_tier="gold",
    )
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["label"] == 7 and found["confidence"] > 0.5 and found["model_version"] == "1"
    assert len(found["probabilities"]) == 10 and max(found["probabilities"]) == found["confidence"]
    assert answer.headers["x-request-id"] == "abc-1"
    stages = [entry.partition(";")[0] for entry in answer.headers["server-timing"].split(", ")]
    assert [each for each in stages if each not in ("logic-body", "logic-wait")] == [
        "logic",
        "logic-pre",
        "logic-infer",
        "logic-post",
        "queue",
        "compute",
    ]
    assert int(answer.headers["x-oriel-cost-us"]) >= 250
    response = parse_traceparent(answer.headers["traceresponse"])
    root, *children = logic.sink.spans
    assert response is not None and response.trace_id == parent.trace_id and response.span_id == root.context.span_id
    assert (root.name, root.parent_id, root.failed) == ("POST /v1/services/{service}", parent.span_id, False)
    assert root.attributes["oriel.request_id"] == "abc-1" and root.attributes["oriel.tier"] == "gold"
    assert [span.name for span in children if span.name != "wait"] == ["body", "pre", "POST", "post"]
    assert {span.parent_id for span in children} == {root.context.span_id}


async def test_the_model_is_not_asked_about_an_empty_picture(stack: Any, inference: Any) -> None:
    """The second example: a condition between a worker's own code and a model call, which carries the request."""
    logic = await stack(EXAMPLES)
    seven = (PICTURES / "7.png").read_bytes()
    told = {"x_oriel_tier": "gold", "x_oriel_tenant": "acme", "x_oriel_timeout_ms": "4000", "x_request_id": "r-9"}
    found = await logic.post("checked_digit", seven, content_type="image/png", **told)
    assert found.status_code == 200, found.text
    assert set(found.json()) == {"label", "confidence", "probabilities"} and found.json()["label"] == 7
    assert max(found.json()["probabilities"]) == found.json()["confidence"] > 0.5
    (exchange,) = inference.calls
    assert [exchange.head.get(f"x-oriel-{name}") for name in ("tier", "tenant")] == ["gold", "acme"]
    assert exchange.head.get("x-request-id") == "r-9" and 0 < int(exchange.head.get("x-oriel-timeout-ms")) <= 4000
    blank = BytesIO()
    Image.new("L", (20, 20), 255).save(blank, "PNG")
    answer = await logic.post("checked_digit", blank.getvalue(), content_type="image/png")
    assert answer.json() == {"blank": True, "reason": "the picture is empty"} and len(inference.calls) == 1


SECRET = "connect to postgres://admin:hunter2@10.0.0.5/pay failed"
LEAKS = f"""
    from oriel_logic import Request, service

    @service
    class broken:
        def setup(self):
            raise RuntimeError("{SECRET}")
        def predict(self, request: Request) -> str:
            return ""
"""
SERVES = """
    from oriel_logic import Request, service

    @service
    def serves(request: Request) -> str:
        return "served"
"""


async def test_tenants_are_told_that_a_service_is_broken_and_operators_why(stack: Any, services: Any) -> None:
    """A tenant read the database's password in the text of the error that the set-up raised."""
    folder = services(broken=LEAKS, serves=SERVES)
    logic = await stack(folder, watch=True)
    (folder / "serves.py").write_text(f"raise RuntimeError({SECRET!r})\n")
    await until(
        lambda: logic.unit.registry.failed_files == 2 and "update" in logic.unit.registry.describe_one("serves")
    )
    for tenant in ({"x-oriel-tenant": "acme"}, {"x-oriel-tier": "gold"}, {}):
        for path, state in (("/broken", "broken"), ("/serves", "ready"), ("", "")):
            answer = await logic.client.get(f"/v1/services{path}", headers=tenant)
            assert ("hunter2" in answer.text, ".py" in answer.text) == (not tenant, not tenant), answer.text
            assert answer.json().get("state", "") == state
            assert '"at":"20' in answer.text
    assert "hunter2" not in (await logic.post("broken", x_oriel_tenant="acme")).text


async def test_clients_of_the_openai_api_find_an_empty_list_where_no_model_is_for_them(stack: Any) -> None:
    logic = await stack(EXAMPLES)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{logic.port}") as client:
        listed = await client.get("/v1/models")
        assert (listed.status_code, listed.json()) == (200, {"object": "list", "data": []})
        assert (await client.post("/v1/completions", json={"model": "x"})).status_code == 404


HANDLERS = """
    import asyncio
    import os
    import signal
    import numpy as np
    from oriel_logic import Answer, Refused, Request, service

    def double(values): return [2 * v for v in values]

    @service
    async def full(request, models, ctx):
        values = await ctx.run(double, request.json())
        with ctx.stage("rank"):
            outputs = await models.infer("double", {"x": np.array([values], np.float32)})
        return {"y": outputs["y"], "tier": ctx.tier, "tenant": ctx.tenant, "left": ctx.remaining_s > 0}

    @service
    async def waits(request, models, ctx):
        await models.infer("double", {"x": [[1, 2]]})

    @service
    async def fan(request, models, ctx):
        async with asyncio.TaskGroup() as group:
            for name in ("double", "nope"):
                group.create_task(models.infer(name, {"x": [[1, 2]]}))

    @service
    def plain(request: Request):
        return Answer(body=request.body[::-1], content_type="text/plain")

    @service
    def headers(request: Request):
        return dict(request.headers)

    @service
    async def stuck(request, models, ctx):
        await asyncio.Event().wait()

    @service
    async def broken(request, models, ctx):
        return {}["missing"]

    @service
    async def odd(request, models, ctx):
        return object()

    @service
    def suicide(request):
        os.kill(os.getpid(), signal.SIGKILL)

    @service
    def block(request):
        with open(request.text()) as gate:
            return gate.read()
"""


async def test_a_handler_may_do_everything_itself_and_errors_say_what_and_why(stack: Any, services: Any) -> None:
    logic = await stack(services(handlers=HANDLERS))
    answer = await logic.post("full", b"[1, 2]", x_oriel_tier="silver", x_oriel_tenant="birch")
    assert answer.json() == {"y": [[4, 8]], "tier": "silver", "tenant": "birch", "left": True}
    timing = answer.headers["server-timing"]
    assert all(f"logic-{stage};dur=" in timing for stage in ("double", "rank", "infer"))
    answer = await logic.post("plain", b"abc")
    assert (answer.text, answer.headers["content-type"]) == ("cba", "text/plain")
    seen = (await logic.post("headers", b"", authorization="secret", x_oriel_tier="gold", x_mine="1")).json()
    assert seen["x-mine"] == "1" and not {"authorization", "x-oriel-tier"} & set(seen)
    missing = await logic.client.get("/nothing")
    assert (missing.status_code, missing.json()["error"]["reason"]) == (404, "not_found")
    wrong = await logic.client.delete("/v1/services/x")
    assert (wrong.status_code, wrong.json()["error"]["reason"]) == (405, "method_not_allowed")
    assert missing.headers["x-request-id"] and wrong.headers["allow"]
    for service, status, reason in (
        ("nothing", 404, "service_unknown"),
        ("broken", 500, "handler_failed"),
        ("odd", 500, "handler_failed"),
        ("suicide", 500, "worker_died"),
        ("fan", 503, "model_unavailable"),
    ):
        answer = await logic.post(service, b"x")
        assert (answer.status_code, answer.json()["error"]["reason"]) == (status, reason)
        assert (await logic.post("plain", b"ab")).text == "ba"


async def test_the_deadline_names_the_stage_it_hit(stack: Any, services: Any, inference: Any, gate: Path) -> None:
    logic = await stack(services(handlers=HANDLERS), overrun_s=0.0)
    inference.hold = True
    for service, stage in (("stuck", "handler"), ("block", "work"), ("waits", "infer")):
        answer = await logic.post(service, str(gate).encode(), x_oriel_timeout_ms="1000")
        error = answer.json()["error"]
        assert (answer.status_code, error["reason"], error["stage"]) == (504, "deadline_exceeded", stage)


async def test_a_services_own_limit_is_told_from_the_requests_deadline(stack: Any, services: Any, gate: Path) -> None:
    logic = await stack(services(handlers=HANDLERS.replace("@service\n", "@service(timeout_s=0.2)\n")), overrun_s=0.0)
    for service in ("stuck", "block"):
        answer = await logic.post(service, str(gate).encode())
        error = answer.json()["error"]
        assert (answer.status_code, error["reason"]) == (504, "handler_timed_out")
        assert "its own limit of 0.2 s" in error["message"] or "longer than 0.2 s" in error["message"]
        answer = await logic.post(service, str(gate).encode(), x_oriel_timeout_ms="50")
        assert (answer.status_code, answer.json()["error"]["reason"]) == (504, "deadline_exceeded")


async def test_inner_headers_count_only_from_this_machine(stack: Any, services: Any) -> None:
    headers = {"x_oriel_tier": "gold", "x_oriel_timeout_ms": "0", "x_request_id": "kept"}
    strict = await stack(services(handlers=HANDLERS), trusted_peers=("192.0.2.7",))
    answer = await strict.post("full", b"[1, 2]", **headers)
    assert answer.status_code == 200 and answer.json()["tier"] == ""
    assert answer.headers["x-request-id"] == "kept"
    logic = await stack(services(handlers=HANDLERS))
    assert (await logic.post("full", b"[1, 2]", **headers)).status_code == 504


async def test_inference_refusals_and_absence_are_told_apart(stack: Any, services: Any, inference: Any) -> None:
    folder = services(handlers=HANDLERS)
    logic = await stack(folder)
    inference.refuse = (429, [("retry-after", "3")], b'{"error": "too many"}')
    answer = await logic.post("full", b"[1, 2]")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    inference.refuse = (503, [], b'{"error": "queue full"}')
    assert (await logic.post("full", b"[1, 2]")).status_code == 503
    gone = await stack(folder, inference_ports=[1])
    answer = await gone.post("full", b"[1, 2]")
    assert (answer.status_code, answer.headers["retry-after"]) == (502, "1")
    assert answer.json()["error"]["reason"] == "model_unreachable"


async def test_a_client_that_leaves_frees_what_it_held(
    stack: Any, services: Any, inference: Any, gate: Path, caplog: Any
) -> None:
    logic = await stack(services(handlers=HANDLERS))
    busy = await Connection.call(logic.port, "block", str(gate).encode())
    await until(lambda: logic.unit.pool.busy)
    queued = await Connection.call(logic.port, "plain", b"abc")
    await until(lambda: logic.unit.pool.waiting)
    queued.leave()
    await until(lambda: not logic.unit.pool.waiting)
    await asyncio.to_thread(gate.write_text, "done")
    assert await busy.status() == 200
    busy.leave()
    await until(lambda: counted(logic, "plain", "client_left"))
    inference.hold = True
    connection = await Connection.call(logic.port, "full", b"[1, 2]")
    await inference.saw_a_call()
    connection.leave()
    await inference.saw_the_caller_leave()
    sending = await Connection.call(logic.port, "plain", b"ab", declared=10)
    await until(lambda: logic.unit.envelope.in_flight)
    sending.leave()
    await until(lambda: not logic.unit.envelope.in_flight)
    assert not caplog.records


async def test_services_are_listed_with_what_is_wrong(stack: Any, services: Any, caplog: Any) -> None:
    folder = services(
        good="from oriel_logic import service\n@service\ndef good(request):\n    'Is good.'\n",
        bad="import nothing_like_it",
        unset="""
            from oriel_logic import service
            @service
            class Unset:
                model = "m"
                def setup(self): raise OSError("no weights")
                def pre(self, request): ...
                def post(self, outputs): ...
        """,
    )
    (folder / "declared.toml").write_text('[[step]]\nname = "one"\nmodel = "m"\n')
    logic = await stack(folder)
    listed = (await logic.client.get("/v1/services")).json()["services"]
    assert [(each["name"], each["state"]) for each in listed] == [
        ("bad", "broken"),
        ("declared", "broken"),
        ("good", "ready"),
        ("unset", "broken"),
    ]
    assert "write it in a .py file with @service" in listed[1]["problem"] and listed[1]["problem"] in caplog.text
    assert re.fullmatch(r"its setup failed: line [1-9]\d*: OSError: no weights", listed[3]["problem"])
    one = await logic.client.get("/v1/services/good")
    assert one.json()["description"] == "Is good."
    assert (await logic.post("unset")).json()["error"]["reason"] == "service_broken"
    assert (await logic.client.get("/v1/services/none")).status_code == 404


async def test_too_many_requests_at_once_are_refused(stack: Any, services: Any) -> None:
    logic = await stack(services(handlers=HANDLERS), max_in_flight=1)
    held = await Connection.call(logic.port, "stuck", b"")
    await until(lambda: logic.unit.envelope.in_flight)
    answer = await logic.post("plain", b"x")
    assert (answer.status_code, answer.json()["error"]["reason"]) == (503, "saturated")
    held.leave()
    await until(lambda: not logic.unit.envelope.in_flight)
    assert (await logic.post("plain", b"x")).status_code == 200


async def test_setup_runs_once_in_every_process_that_needs_it(
    stack: Any, services: Callable[..., Path], tmp_path: Path
) -> None:
    folder = services(
        counted=f"""
            import os
            from oriel_logic import service
            @service
            class Counted:
                model = "double"
                def setup(self):
                    self.factor = 3
                    with open({str(tmp_path / "log")!r}, "a") as log: log.write(f"{{os.getpid()}} ")
                def pre(self, request): return {{"x": [[self.factor, 1]]}}
                async def post(self, outputs): return outputs["y"] * self.factor
        """
    )
    logic = await stack(folder, workers=2)
    assert (await logic.post("counted")).json() == [[18, 6]]
    pids = (tmp_path / "log").read_text().split()
    assert len(pids) == len(set(pids)) == 3
    assert set(map(str, logic.unit.pool.pids)) == set(pids) - {str(os.getpid())}


async def test_a_service_that_is_full_after_its_model_ran_is_not_to_be_asked_again(stack: Any, services: Any) -> None:
    """The gateway took `saturated` for "nothing was executed" and ran the model a second time."""
    source = """
        from oriel_logic import service
        from oriel_logic.errors import Saturated
        @service
        async def late(request, models, ctx):
            if request.json()[0]:
                await models.infer("double", {"x": [[1.0, 2.0]]})
            raise Saturated("no worker is free", retry_after_s=1.0)
    """
    logic = await stack(services(late=source))
    for body, said in ((b"[1]", "spent"), (b"[0]", None)):
        answer = await logic.post("late", body, content_type="application/json")
        assert (answer.status_code, answer.json()["error"]["reason"]) == (503, "saturated"), answer.text
        assert answer.headers.get("x-oriel-retry") == said


async def test_bodies_that_wait_are_bounded_together(stack: Any, services: Any) -> None:
    logic = await stack(services(handlers=HANDLERS), max_held_bytes=150_000)
    held = await Connection.call(logic.port, "stuck", b"x" * 100_000)
    await until(lambda: logic.unit.envelope.in_flight)
    answer = await logic.post("plain", b"x" * 100_000)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (503, "saturated")
    assert (await logic.post("plain", b"x")).status_code == 200  # small ones are not counted
    held.leave()
    await until(lambda: not logic.unit.envelope.in_flight)
    assert (await logic.post("plain", b"x" * 100_000)).status_code == 200


async def test_a_worker_that_reports_before_its_services_are_published_is_heard(
    stack: Any, services: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported, load, ready = threading.Event(), app.load, WorkerPool.ready

    def late(files: Any) -> Any:
        assert reported.wait(60)
        return load(files)

    def noted(pool: WorkerPool, *worker: Any) -> None:
        ready(pool, *worker)
        reported.set()

    monkeypatch.setattr(app, "load", late)
    monkeypatch.setattr(WorkerPool, "ready", noted)
    folder = services(
        unset="""
            from oriel_logic import service
            @service
            class Unset:
                model = "m"
                def setup(self): raise OSError("no weights")
                def pre(self, request): ...
                def post(self, outputs): ...
        """
    )
    logic = await stack(folder)
    (listed,) = (await logic.client.get("/v1/services")).json()["services"]
    assert listed["state"] == "broken"
