"""Language models through the whole server, with the double of an engine in its process: both protocols, streams, an
ensemble of four models in one folder, tiers, a death of the process, and an unload.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as triton

from oriel_inference.app import Unit
from oriel_inference.language.backend import LanguageSession
from oriel_inference.language.scheduler import LanguageScheduler
from oriel_wire.observe.trace import ListSink

from ..waiting import until
from .exposed import scrape
from .python_calls import served

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = "".join(
    f'parameters {{ key: "oriel.{key}" value {{ string_value: "{value}" }} }}\n'
    for key, value in {"engine": "double", "max_running": 2, "double.step_ms": 5}.items()
)
PREPARE = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([
            pb_utils.Tensor("prompt", np.array([b"<|user|>" + each.inputs()[0].as_numpy()[0] + b"<|answer|>"], object)),
            pb_utils.Tensor("stream", np.array([True])),
        ]) for each in requests]
"""
SHOUT = """
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([
            pb_utils.Tensor("loud", np.array([each.inputs()[0].as_numpy()[0].upper()], object))
        ]) for each in requests]
"""
TEXT = '{{ name: "{}" data_type: TYPE_STRING dims: [ 1 ] }}'


def maps(kind: str, **pairs: str) -> str:
    return " ".join(f'{kind} {{ key: "{key}" value: "{value}" }}' for key, value in pairs.items())


def repository(root: Path) -> Path:
    flag = '{ name: "stream" data_type: TYPE_BOOL dims: [ 1 ] }'
    steps = (
        f'step {{ model_name: "prepare" model_version: -1 {maps("input_map", question="question")} '
        f"{maps('output_map', prompt='prompt', stream='flag')} }} "
        f'step {{ model_name: "chat" model_version: -1 {maps("input_map", text_input="prompt", stream="flag")} '
        f"{maps('output_map', text_output='piece')} }} "
        f'step {{ model_name: "shout" model_version: -1 {maps("input_map", quiet="piece")} '
        f"{maps('output_map', loud='loud')} }}"
    )
    configs = {
        "prepare": f'backend: "python" input {TEXT.format("question")} output {TEXT.format("prompt")} output {flag}',
        "shout": f'backend: "python" input {TEXT.format("quiet")} output {TEXT.format("loud")}',
        "chat": CONFIG,
        "pipeline": f'platform: "ensemble" input {TEXT.format("question")} output {TEXT.format("loud")} '
        f"ensemble_scheduling {{ {steps} }}",
    }
    for name, config in configs.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    (root / "prepare/1/model.py").write_text(PREPARE)
    (root / "shout/1/model.py").write_text(SHOUT)
    (root / "chat/1/model.gguf").write_bytes(b"weights")
    return root


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(tmp_path_factory: Any) -> AsyncIterator[tuple[Unit, httpx.AsyncClient]]:
    async with served(repository(tmp_path_factory.mktemp("language")), mode="none") as found:
        yield found


async def events(http: httpx.AsyncClient, model: str = "chat", **body: Any) -> list[dict[str, Any]]:
    headers = body.pop("headers", None)
    async with http.stream("POST", f"/models/{model}/generate_stream", json=body, headers=headers) as answer:
        return [json.loads(line.removeprefix("data: ")) async for line in answer.aiter_lines() if line]


def scheduler(unit: Unit) -> LanguageScheduler:
    found = unit.catalog.get("chat").batcher
    assert isinstance(found, LanguageScheduler)
    return found


async def test_generate_answers_at_once_or_as_a_stream(serving: tuple[Unit, httpx.AsyncClient]) -> None:
    unit, http = serving
    answer = await http.post("/models/chat/generate", json={"text_input": "<|user|>hello<|answer|>", "max_tokens": 99})
    assert answer.status_code == 200, answer.text
    assert answer.json()["text_output"] == "<|user|>hello<|answer|>hello"
    assert (answer.json()["finish_reason"], answer.json()["completion_tokens"]) == ("stop", 6)
    assert {"queue", "compute", "first_token", "paused"} == {
        each.partition(";")[0].strip() for each in answer.headers["server-timing"].split(",")
    }
    parts = await events(http, text_input="<|user|>hello<|answer|>", stream=True, max_tokens=99)
    assert "".join(each["text_output"] for each in parts) == "hello" and len(parts) == 6
    assert parts[-1]["finish_reason"] == "stop"
    refused = await http.post("/models/chat/generate", json={"text_input": "a", "temperature": -1})
    assert refused.status_code == 400 and "temperature" in refused.json()["error"]
    late = await http.post(
        "/models/chat/generate",
        json={"text_input": "endless", "max_tokens": 4000},
        headers={"x-oriel-timeout-ms": "60"},
    )
    assert (late.status_code, late.json()["reason"]) == (504, "deadline_exceeded")
    assert 'oriel_language_calls{model="chat",version="1",priority="0",state="running"} 0' in (await scrape(unit)).text
    ready = await http.get("/health/ready")
    load = json.loads(ready.headers["x-oriel-language"])
    assert load["calls"] == {"0": [0, 0, 0]} and load["made"] >= 12


async def test_a_grpc_stream_carries_ids_in_and_out_and_a_cancel_ends_the_sequence(
    serving: tuple[Unit, httpx.AsyncClient],
) -> None:
    unit, _ = serving
    asked: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def requests() -> AsyncIterator[dict[str, Any]]:
        while (request := await asked.get()) is not None:
            yield request

    def ask(number: str, ids: list[int], **parameters: Any) -> dict[str, Any]:
        inputs = [triton.InferInput("input_ids", [len(ids)], "INT64"), triton.InferInput("stream", [1], "BOOL")]
        inputs[0].set_data_from_numpy(np.array(ids, np.int64))
        inputs[1].set_data_from_numpy(np.array([True]))
        return {"model_name": "chat", "inputs": inputs, "request_id": number, "parameters": parameters}

    async with triton.InferenceServerClient(f"127.0.0.1:{unit.grpc_port}") as client:
        answers = client.stream_infer(requests())
        await asked.put(ask("1", [259, *b"hi", 261], max_tokens=20))
        ids: list[int] = []
        async for result, error in answers:
            assert error is None
            ids += result.as_numpy("output_ids").tolist()
            last = result.get_response().parameters
            if last["triton_final_response"].bool_param:
                break
        assert ids == [*b"hi", 257] and last["finish_reason"].string_param == "stop"
        await asked.put(ask("2", [*b"endless"], max_tokens=4000))
        await anext(answers)
        assert scheduler(unit).running == 1
        answers.cancel()
        await until(lambda: scheduler(unit).running == 0)


async def test_an_ensemble_of_code_around_a_language_model_streams(serving: tuple[Unit, httpx.AsyncClient]) -> None:
    unit, http = serving
    parts = await events(http, "pipeline", question="tell me", headers={"x-oriel-tenant": "acme"})
    assert "".join(each["loud"] for each in parts) == "TELL ME" and len(parts) > 5
    rows = [row for row in unit.surface.devices.book.rows() if row.key.target == "pipeline" and row.tokens_out]
    assert [(row.tokens_in, row.tokens_out) for row in rows] == [(9, 8)]


async def test_a_more_urgent_tier_makes_a_stream_pause_which_is_shown_everywhere(
    serving: tuple[Unit, httpx.AsyncClient],
) -> None:
    unit, http = serving
    bronze = [
        asyncio.create_task(
            events(http, text_input=f"bronze {each}", stream=True, max_tokens=80, headers={"x-oriel-priority": "2"})
        )
        for each in range(2)
    ]
    await until(lambda: scheduler(unit).running == 2)
    await until(lambda: all(each.has_begun for each in scheduler(unit).order.running))
    gold = await events(http, text_input="gold", stream=True, max_tokens=20, headers={"x-oriel-priority": "0"})
    lasts = [(await each)[-1] for each in bronze]
    assert len(gold) == 20 and gold[-1]["paused"] == 0
    assert sum([each["paused"] for each in lasts]) >= 1 and all(each["completion_tokens"] == 80 for each in lasts)
    sink = unit.surface.sink
    assert isinstance(sink, ListSink)
    spans = [each for each in sink.spans if each.name == "compute" and each.attributes.get("oriel.pauses")]
    paused = [each for each in lasts if each["paused"]]
    assert len(spans) == len(paused) and spans[0].attributes["gen_ai.usage.output_tokens"] == 80
    text = (await scrape(unit)).text
    assert 'oriel_language_pauses_total{model="chat",version="1"} 0' not in text


async def test_a_stream_that_its_client_leaves_makes_no_more_tokens(serving: tuple[Unit, httpx.AsyncClient]) -> None:
    unit, http = serving
    body = {"text_input": "endless", "stream": True, "max_tokens": 4000}
    async with http.stream("POST", "/models/chat/generate_stream", json=body) as answer:
        await anext(answer.aiter_lines())
        assert scheduler(unit).running == 1
    await until(lambda: scheduler(unit).running == 0)


async def test_the_death_of_the_process_ends_its_streams_and_the_waiting_are_answered_by_the_next(
    serving: tuple[Unit, httpx.AsyncClient],
) -> None:
    unit, http = serving
    session = unit.catalog.get("chat").sessions[0]
    assert isinstance(session, LanguageSession)
    tasks = [
        asyncio.create_task(events(http, text_input=f"stream {each}", stream=True, max_tokens=most))
        for each, most in enumerate((4000, 4000, 30))
    ]
    await until(lambda: all(each.has_begun for each in scheduler(unit).order.running) and scheduler(unit).pending == 1)
    assert session.decoder.pid is not None
    os.kill(session.decoder.pid, signal.SIGKILL)
    ends = [(await each)[-1] for each in tasks]
    assert ["died (" in each.get("error", "") for each in ends] == [True, True, False]
    assert ends[2]["completion_tokens"] == 30
