"""Pipelines are ordinary Python: what a handler writes is what runs, and every call knows its request."""

import asyncio
from time import monotonic
from typing import Any

from oriel_logic import Models, service
from oriel_logic.testing import Client, FakeClock, FakeModels

from ..waiting import until

PLAIN = """
    import asyncio
    import numpy as np
    from oriel_logic import service

    ROW = np.array([[1, 2]], np.float32)

    @service
    async def sequence(request, models, ctx):
        y = (await models.infer("double", {"x": ROW}))["y"]
        return (await models.infer("double", {"x": y}))["y"]

    @service
    async def fan(request, models, ctx):
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(models.infer("double", {"x": ROW * n})) for n in (1, 2)]
        return [call.result()["y"] for call in calls]
"""


async def test_independent_calls_are_outstanding_at_the_same_time(stack: Any, services: Any, inference: Any) -> None:
    """A server that answers nothing until it has both calls: in a row they would wait for one another for ever."""
    logic = await stack(services(plain=PLAIN))
    inference.hold = True
    asked = asyncio.ensure_future(logic.post("fan", x_oriel_tier="gold", x_oriel_tenant="acme", x_request_id="r-7"))
    await until(lambda: len(inference.calls) >= 2)
    heads = [exchange.head for exchange in inference.calls]
    for exchange in inference.calls:
        inference.answer(exchange, "double")
    answer = await asked
    assert answer.json() == [[[2, 4]], [[4, 8]]]
    for head in heads:
        assert [head.get(f"x-oriel-{name}") for name in ("tier", "tenant")] == ["gold", "acme"]
        assert head.get("x-request-id") == "r-7"
    traces = {head.get("traceparent").split("-")[1] for head in heads}
    spans = {head.get("traceparent").split("-")[2] for head in heads}
    assert len(traces) == 1 and len(spans) == 2
    root = next(span for span in logic.sink.spans if span.kind == "server")
    assert traces == {f"{root.context.trace_id:032x}"}
    assert spans == {f"{span.context.span_id:016x}" for span in logic.sink.spans if span.kind == "client"}


async def test_the_second_call_of_a_sequence_has_less_time(stack: Any, services: Any, inference: Any) -> None:
    logic = await stack(services(plain=PLAIN))
    inference.hold = True
    asked = asyncio.ensure_future(logic.post("sequence", x_oriel_timeout_ms="60000"))
    await inference.saw_a_call()
    came = monotonic()
    await until(lambda: monotonic() > came + 0.025)
    inference.hold = False
    inference.answer(inference.calls[0], "double")
    assert (await asked).json() == [[4, 8]]
    first, second = (int(exchange.head.get("x-oriel-timeout-ms")) for exchange in inference.calls)
    assert second <= first - 20 <= 59_980


# -- the same by the testing kit ---------------------------------------------------------------------------------------


@service
async def ranked(request: Any, models: Models, ctx: Any) -> Any:
    """The small model if the deadline is near, or for those who did not pay for the large one."""
    with ctx.stage("look"):
        first = await models.infer("first", {})
    model = "small" if ctx.remaining_s < 1.0 or ctx.tier == "bronze" else "large"
    return {"model": model, "score": float((await models.infer(model, dict(first)))["score"][0])}


def test_a_fallback_by_time_and_tier() -> None:
    clock = FakeClock()
    models = FakeModels(
        {"first": {"x": [1.0]}, "large": {"score": [0.9]}, "small": {"score": [0.8]}},
        takes_s={"first": 0.5},
        clock=clock,
    )
    client = Client(ranked, models=models, clock=clock)
    assert client.post(timeout_s=5.0, tier="gold").json() == {"model": "large", "score": 0.9}
    assert client.post(timeout_s=1.2, tier="gold").json() == {"model": "small", "score": 0.8}
    assert client.post(timeout_s=5.0, tier="bronze").json() == {"model": "small", "score": 0.8}
    assert [round(call.remaining_s, 1) for call in models.calls] == [5.0, 4.5, 1.2, 0.7, 5.0, 4.5]
