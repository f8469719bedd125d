"""The testing kit: what runs is the server's own code, and plain test functions need no loop."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from oriel_logic import Models, batched, service
from oriel_logic.errors import ModelBusy, ModelInputWrong, ModelUnavailable
from oriel_logic.testing import Client, FakeClock, FakeModels, spec


@service
async def label(request: Any, models: Models, ctx: Any) -> dict[str, Any]:
    outputs = await models.infer("digits", {"image": request.json()})
    return {"label": int(outputs["label"][0, 0]), "tier": ctx.tier, "left_s": ctx.remaining_s}


def test_five_lines_are_enough() -> None:
    models = FakeModels({"digits": {"label": [[7]]}})
    answer = Client(label, models=models).post(json=[[1.0, 2.0]])
    assert answer.status_code == 200 and answer.json()["label"] == 7
    assert models.calls[0].inputs["image"].tolist() == [[1, 2]]


async def test_the_plain_client_works_inside_a_running_loop() -> None:
    assert Client(label, models={"digits": {"label": [[1]]}}).post(json=[[1]]).status_code == 200


def test_what_a_gateway_would_say_arrives() -> None:
    clock = FakeClock()
    client = Client(label, models=FakeModels({"digits": {"label": [[7]]}}, clock=clock), clock=clock)
    answer = client.post(json=[[1]], tier="gold", tenant="acme", timeout_s=2.5, headers={"x-request-id": "r-1"})
    assert answer.json() == {"label": 7, "tier": "gold", "left_s": 2.5}
    (call,) = client.models.calls
    assert (call.tier, call.tenant, call.request_id, call.remaining_s) == ("gold", "acme", "r-1", 2.5)
    assert answer.headers["x-request-id"] == "r-1" and "logic-infer" in answer.headers["server-timing"]


def test_errors_are_answers_with_the_servers_statuses() -> None:
    client = Client(label, models={"digits": ModelBusy("full", retry_after_s=3.0)})
    answer = client.post(json=[[1]])
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    assert answer.json()["error"]["reason"] == "model_busy"
    missing = Client(label).post(json=[[1]])
    assert missing.json()["error"]["reason"] == "model_unavailable" and "the fakes are none" in missing.text
    assert client.post(content=b"{").status_code == 422
    assert client.request("GET", "/v1/services/nope").status_code == 404
    assert client.post("nope", json=1).status_code == 404


def test_a_mistake_of_the_service_is_raised_in_the_test() -> None:
    @service
    async def mistaken(request: Any, models: Any, ctx: Any) -> Any:
        return {}["missing"]

    with pytest.raises(KeyError, match="missing"):
        Client(mistaken).post()
    assert Client(mistaken, raise_errors=False).post().status_code == 500


@batched(max_rows=4)
def same_rows(rows: list[int]) -> list[int]:
    assert rows, "it is not called without any"
    return rows


def test_rows_are_as_in_a_worker_also_when_there_are_none() -> None:
    @service
    async def same(rows: list[int], ctx: Any) -> list[int]:
        found: list[int] = await ctx.run(same_rows, rows)
        return found

    client = Client(same)
    assert client.post(json={"rows": [1, 2]}).json() == [1, 2]
    assert client.post(json={"rows": []}).json() == []


def test_chains_are_set_up_and_run() -> None:
    @service
    class Digits:
        model = "digits"

        def setup(self) -> None:
            self.scale = 2.0

        def pre(self, request: Any) -> dict[str, Any]:
            return {"image": np.asarray(request.json(), np.float32) * self.scale}

        async def post(self, outputs: Any) -> Any:
            return {"label": int(outputs["label"][0, 0])}

    digits = spec("digits", inputs={"image": ("FP32", [-1, 2])}, outputs={"label": ("INT64", [-1, 1])})
    models = FakeModels({"digits": lambda image: {"label": image[:, :1].astype(np.int64)}}, specs=[digits])
    assert Client(Digits, models=models).post(json=[[2, 3]]).json() == {"label": 4}
    assert models.calls[0].inputs["image"].dtype == np.float32
    wrong = Client(Digits, models=models).post(json=[[2, 3, 4]]).json()["error"]
    assert wrong["reason"] == "model_input_wrong" and "input 'image' of model 'digits'" in wrong["message"]


def test_a_file_or_a_folder_is_served_like_on_a_server(services: Any) -> None:
    folder = services(
        two="""
        from oriel_logic import service
        @service(name="first")
        async def a(request, models, ctx): return 1
        @service(name="second")
        async def b(request, models, ctx): return 2
        """,
        broken="import nothing_of_that_name",
        empty="",
    )
    client = Client(folder / "two.py")
    assert client.post("second").json() == 2
    with pytest.raises(ValueError, match="first, second"):
        client.post()
    for name, said in (("broken", "nothing_of_that_name"), ("empty", "has no service")):
        with pytest.raises(TypeError, match=said):
            Client(folder / f"{name}.py")
    with pytest.raises(FileNotFoundError):
        Client(folder / "none.py")
    with pytest.raises(TypeError, match="put @service on it"):
        Client(len)


# -- the models by themselves ------------------------------------------------------------------------------------------


async def test_fakes_can_be_given_to_a_handler_as_they_are() -> None:
    async def half(x: Any) -> dict[str, Any]:
        return {"y": x / 2}

    models = FakeModels({"half": half, "three": [{"y": [1]}, {"y": [2]}, {"y": [3]}]})
    outputs = await models.infer("half", {"x": [4.0]}, version="9")
    assert outputs["y"].tolist() == [2.0] and outputs.model_version == "9"
    assert [each["y"].tolist() async for each in models.stream("three", {})] == [[1], [2], [3]]
    assert await models.ready("half") and not await models.ready("nope")
    with pytest.raises(ModelUnavailable):
        await models.infer("nope", {})


async def test_streams_come_from_lists_and_generators() -> None:
    def count(n: Any) -> Iterator[dict[str, Any]]:
        yield from ({"i": [index]} for index in range(int(n[0])))

    async def slow(n: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"i": n}

    def listed(n: Any) -> Any:
        return slow(n)

    models = FakeModels({"count": count, "slow": listed, "one": {"i": [5]}})
    for name, expected in (("count", [[0], [1]]), ("slow", [[2]]), ("one", [[5]])):
        assert [each["i"].tolist() async for each in models.stream(name, {"n": [2]})] == expected


async def test_a_scan_is_checked_with_its_time_axis() -> None:
    def detect(chunk: Any, hidden: Any = 0.0) -> dict[str, Any]:
        return {"speech": chunk.sum(axis=1) + hidden, "hidden_out": chunk[-1:]}

    known = [
        spec("rows", inputs={"chunk": ("FP32", [-1, 2])}, outputs={"speech": ("FP32", [-1, 1])}),
        spec("single", inputs={"chunk": ("FP32", [2])}, outputs={"speech": ("FP32", [1])}),
    ]
    models = FakeModels({"rows": detect, "single": detect}, specs=known)
    for model in ("rows", "single"):
        found = await models.scan(model, {"chunk": [[1, 2], [3, 4]]}, state={"hidden": np.ones(1, np.float32)})
        assert found["speech"].tolist() == [4, 8] and models.calls[-1].inputs["chunk"].dtype == np.float32
        assert list(await models.scan(model, {"chunk": [[1, 2]]}, outputs=["hidden_out"])) == ["hidden_out"]
        with pytest.raises(ModelInputWrong, match="input 'chunk' of model"):
            await models.scan(model, {"chunk": [[1, 2, 3]]})


async def test_specs_are_kept_by_both_sides() -> None:
    known = spec("m", inputs={"x": ("FP32", [-1])}, outputs={"y": ("INT64", [-1])})
    models = FakeModels({"m": lambda x: {"y": x}}, specs=[known])
    assert await models.metadata("m") is known
    with pytest.raises(ModelInputWrong, match="input 'x' of model 'm' takes FP32"):
        await models.infer("m", {"x": np.zeros(1)})
    with pytest.raises(ValueError, match="output 'y' of model 'm' gives INT64"):
        await models.infer("m", {"x": np.zeros(1, np.float32)})


def test_a_slow_model_moves_the_clock_and_may_be_too_late() -> None:
    clock = FakeClock()
    models = FakeModels({"digits": {"label": [[7]]}}, takes_s={"digits": 2.0}, clock=clock)
    client = Client(label, models=models, clock=clock)
    assert client.post(json=[[1]], timeout_s=3.0).json()["left_s"] == pytest.approx(1.0)
    late = client.post(json=[[1]], timeout_s=1.0)
    assert late.status_code == 504 and late.json()["error"]["stage"] == "infer"
    with pytest.raises(TypeError, match="clock"):
        FakeModels(takes_s={"m": 1.0})


# -- inputs and outputs of every kind ----------------------------------------------------------------------------------


@service
def asking(x: float, models: Any, ctx: Any) -> dict[str, Any]:
    with ctx.stage("ask"):
        y = models.infer("m", {"x": [x]})["y"]
    return {"y": float(y[0]), "tier": ctx.tier, "left_s": ctx.remaining_s}


def test_a_plain_function_may_call_models_and_read_the_clock() -> None:
    clock = FakeClock()
    client = Client(asking, models=FakeModels({"m": {"y": [3.0]}}, clock=clock, takes_s={"m": 1.0}), clock=clock)
    assert client.post(json={"x": 1.0}, tier="gold", timeout_s=4.0).json() == {"y": 3.0, "tier": "gold", "left_s": 3.0}


def test_a_spec_of_a_datatype_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="'x' of 'm' is FP99, which is none of BOOL, "):
        spec("m", inputs={"x": ("FP99", [1])}, outputs={})
