"""No name, number or text that a service makes up breaks the head of its answer, its trace or the metrics."""

import re
from itertools import product
from typing import Any

from prometheus_client import generate_latest

STAGES = """
    from oriel_logic import Refused, service

    NAMES = [
        *("a, b;dur=9", "two words", "x\\r\\nset-cookie: a=b", "stadt-\\u6771\\u4eac", "\\udc80", "", "n" * 5000),
        "gr\\u00f6\\u00dfe",
    ]

    def here(number):
        return number

    @service
    async def beside(request, ctx):
        with ctx.stage(NAMES[int(request.body)]):
            return {"done": True}

    @service
    def inside(request, ctx):
        with ctx.stage(NAMES[int(request.body)]):
            return {"done": True}

    @service
    async def function(request, ctx):
        here.__name__ = NAMES[int(request.body)]
        return {"done": await ctx.run(here, 1) == 1}

    REFUSALS = [
        lambda: Refused("no", retry_after_s=float("nan")),
        lambda: Refused("no", retry_after_s=float("inf")),
        lambda: Refused("no", retry_after_s=-7),
        lambda: Refused("no", field="$.\\udc80"),
        lambda: Refused("\\udc80\\r\\nx: y"),
        lambda: Refused(b"no"),
        lambda: Refused("no", field=b"$.x"),
    ]

    @service
    async def refuses(request):
        raise REFUSALS[int(request.body)]()

    @service
    def refuses_inside(request):
        raise REFUSALS[int(request.body)]()
"""
ENTRY = re.compile(r"[A-Za-z0-9_.-]{1,64};dur=[0-9]+\.[0-9]{3}")


async def test_names_of_stages_are_written_as_tokens(stack: Any, services: Any) -> None:
    logic = await stack(services(made_up=STAGES))
    for service, number in product(("beside", "inside", "function"), range(8)):
        answer = await logic.post(service, str(number).encode())
        assert (answer.status_code, answer.json()) == (200, {"done": True}), number
        timing = answer.headers["server-timing"]
        assert all(ENTRY.fullmatch(entry) for entry in timing.split(", ")), timing
        assert "set-cookie" not in answer.headers and len(timing) < 2048
    assert all(len(span.name) <= 64 and span.name.isascii() for span in logic.sink.spans)
    assert "x__set-cookie__a_b" in generate_latest(logic.unit.metrics.registry).decode()


async def test_refusals_with_odd_values_are_answered(stack: Any, services: Any) -> None:
    logic = await stack(services(made_up=STAGES))
    for service, number in product(("refuses", "refuses_inside"), range(7)):
        answer = await logic.post(service, str(number).encode())
        assert answer.status_code == 422 and answer.json()["error"]["reason"] == "input_refused", answer.text
        assert 0 <= int(answer.headers.get("retry-after", 0)) <= 86_400 and "x" not in answer.headers
