"""Ensembles with decoupled steps: each response goes through the steps behind them. The expected responses are those of
Triton 24.10 for the same folders.
"""

import asyncio
import queue
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc

from oriel_inference.app import Unit, open_unit
from oriel_inference.ensembles.scheduler import Ensemble
from oriel_inference.settings import Settings
from oriel_wire.observe.trace import ListSink

from ..waiting import until
from .python_calls import put, served

ADD = "".join(
    [
        "import triton_python_backend_utils as pb_utils\n",
        "class TritonPythonModel:\n",
        "    def execute(self, requests):\n",
        "        sums = [sum(each.as_numpy() for each in request.inputs()) + 100 for request in requests]\n",
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor('o', each)]) for each in sums]\n",
    ]
)


def tensors(kind: str, *names: str) -> str:
    return " ".join(f'{kind} {{ name: "{name}" data_type: TYPE_INT32 dims: [ 1 ] }}' for name in names)


def model(inputs: str, outputs: str = "o", *, decoupled: bool = False) -> str:
    policy = "model_transaction_policy { decoupled: true }" if decoupled else ""
    return f'backend: "python" {tensors("input", *inputs)} {tensors("output", *outputs)} {policy} max_batch_size: 4'


def ensemble(*steps: str, outputs: str = "x") -> str:
    """steps: "model input=tensor>output=tensor", several of each with commas."""
    found = []
    for step in steps:
        name, maps = step.split()
        fields = [f'model_name: "{name}" model_version: -1']
        for kind, pairs in zip(("input_map", "output_map"), maps.split(">"), strict=True):
            for pair in pairs.split(","):
                key, value = pair.split("=")
                fields.append(f'{kind} {{ key: "{key}" value: "{value}" }}')
        found.append(f"step {{ {' '.join(fields)} }}")
    io = f"{tensors('input', 'n')} {tensors('output', *outputs)}"
    return f'platform: "ensemble" max_batch_size: 4 {io} ensemble_scheduling {{ {" ".join(found)} }}'


ENSEMBLES = {
    "behind": ensemble("count n=n>o=m", "add a=m>o=x"),
    "pair": ensemble("counts n=n>o=m,p=k", "add2 a=m,b=k>o=x"),
    "last": ensemble("add a=n>o=m", "minus a=m>o=k", "count n=k>o=x"),
    "nested": ensemble("count n=n>o=m", "count n=m>o=x"),
    "outer": ensemble("behind n=n>x=m", "add a=m>o=x"),
    "wrap": ensemble("behind n=n>x=x"),
    "mixed": ensemble("count n=n>o=m", "add2 a=m,b=n>o=x"),
    "twice": ensemble("count n=n>o=m", "count n=n>o=k", "add2 a=m,b=k>o=x"),
    "outputs": ensemble("count n=n>o=x", "add a=n>o=y", outputs="xy"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unit(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Unit]:
    root = tmp_path_factory.mktemp("decoupled-ensembles")
    put(root, "count", "count", model("n", decoupled=True))
    put(root, "counts", "count", model("n", "op", decoupled=True))
    for name, config in {"add": model("a"), "add2": model("ab"), "minus": model("a")}.items():
        code = ADD.replace("+ 100", "- 100") if name == "minus" else ADD
        (put(root, name, "count", config) / "1/model.py").write_text(code)
    for name, config in ENSEMBLES.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    settings = Settings(repositories=(root,), http_port=0, grpc_port=0, metrics_port=0, strict_readiness=False)
    async with open_unit(settings, sink=ListSink()) as running:
        yield running


def ask(port: int, name: str, number: int) -> list[int | str]:
    """Return the numbers of all responses, and the text of an error at the end."""
    answers: queue.Queue[list[int | str]] = queue.Queue()

    def answered(result: tritonclient.grpc.InferResult | None, error: Exception | None) -> None:
        if result is None:
            answers.put([str(error)])
            return
        response = result.get_response()
        found = result.as_numpy("x")
        final = response.parameters["triton_final_response"].bool_param
        answers.put([*([] if found is None else [int(found.flat[0])]), *(["end"] if final else [])])

    found: list[int | str] = []
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.start_stream(answered)
        given = tritonclient.grpc.InferInput("n", [1, 1], "INT32")
        given.set_data_from_numpy(np.array([[number]], np.int32))
        client.async_stream_infer(name, [given], enable_empty_final_response=True)
        while not found or not isinstance(found[-1], str):
            found += answers.get(timeout=60)
    return found


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("name", "number", "expected"),
    [
        ("behind", 3, [100, 101, 102, "end"]),
        ("behind", 0, ["end"]),
        ("behind", 40, [*range(100, 140), "end"]),
        ("behind", -2, ["half way"]),
        ("pair", 3, [110, 112, 114, "end"]),
        ("last", 2, [0, 1, "end"]),
        ("nested", 4, [0, 0, 1, 0, 1, 2, "end"]),
        ("outer", 2, [200, 201, "end"]),
    ],
)
async def test_each_response_goes_through_the_steps_behind(
    unit: Unit, name: str, number: int, expected: list[int | str]
) -> None:
    found = await asyncio.to_thread(ask, unit.grpc_port, name, number)
    if number < 0:  # whether the responses before the error come depends on the time that they take
        found = [str(found[-1])[-len("half way") :]]
    assert found == expected
    scheduler = unit.catalog.get(name).batcher
    assert isinstance(scheduler, Ensemble)
    await until(lambda: not scheduler.running)
    assert not scheduler._size_bytes, "all tensors were dropped"


@pytest.mark.asyncio(loop_scope="module")
async def test_such_an_ensemble_is_decoupled_for_clients(unit: Unit) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{unit.http_port}/v2/models", trust_env=False) as http:
        config = (await http.get("/behind/config")).json()
        assert config["model_transaction_policy"] == {"decoupled": True}
        inputs = [{"name": "n", "datatype": "INT32", "shape": [1, 1], "data": [1]}]
        assert (await http.post("/behind/infer", json={"inputs": inputs})).status_code == 501


@pytest.mark.asyncio(loop_scope="module")
async def test_a_caller_that_leaves_ends_all_steps(unit: Unit) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{unit.http_port}/v2/models", trust_env=False) as http:
        async with http.stream("POST", "/behind/generate_stream", json={"n": 1_000_000}) as response:
            assert "100" in await anext(response.aiter_lines())
    for name in ("behind", "count"):
        batcher = unit.catalog.get(name).batcher
        await until(lambda batcher=batcher: not batcher.running)  # type: ignore[misc]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", ["mixed", "twice", "outputs"])
async def test_tensors_of_different_responses_do_not_meet(unit: Unit, name: str) -> None:
    (entry,) = unit.catalog.entries(name)
    assert "takes tensors of different decoupled models, or of one and of the request" in entry.reason


@pytest.mark.asyncio(loop_scope="module")
async def test_a_response_that_ends_its_call_ends_it_once(unit: Unit, caplog: pytest.LogCaptureFixture) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{unit.http_port}/v2/models", trust_env=False) as http:
        answer = await http.post("/wrap/generate", json={"n": 3})
    assert answer.status_code == 501 and "more than one response" in answer.text
    for name in ("wrap", "behind", "count", "add"):
        batcher = unit.catalog.get(name).batcher
        await until(lambda batcher=batcher: not batcher.running)  # type: ignore[misc]
    assert not caplog.records


async def test_an_ensemble_is_decoupled_as_long_as_a_step_is(tmp_path: Path) -> None:
    folder = put(tmp_path, "count", "count", model("n", decoupled=True))
    (tmp_path / "e/1").mkdir(parents=True)
    (tmp_path / "e/config.pbtxt").write_text(ensemble("count n=n>o=x"))
    async with served(tmp_path, "e") as (_, http):
        (folder / "config.pbtxt").write_text(model("n"))
        (folder / "1/model.py").write_text(ADD)
        assert (await http.post("/repository/models/count/load")).status_code == 200
        assert (await http.get("/models/e/config")).json()["model_transaction_policy"] == {"decoupled": False}
        answer = await http.post("/models/e/generate", json={"n": 1})
        assert answer.json()["x"] == 101


async def test_ensembles_above_follow_when_a_step_gets_decoupled(tmp_path: Path) -> None:
    folder = put(tmp_path, "count", "count", model("n"))
    (folder / "1/model.py").write_text(ADD)
    for name, steps in {"inner": ["count n=n>o=x"], "above": ["count n=n>o=m", "inner n=m>x=x"]}.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(ensemble(*steps))
    async with served(tmp_path, "above") as (running, http):
        put(tmp_path, "count", "count", model("n", decoupled=True))
        assert (await http.post("/repository/models/count/load")).status_code == 200
        assert await asyncio.to_thread(ask, running.grpc_port, "above", 4) == [0, 0, 1, 0, 1, 2, "end"]
