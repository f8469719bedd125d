"""`oriel models` against the real server, and against answers as other v2 servers write them."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper, save_model

from oriel_cli import state
from oriel_cli.main import main
from oriel_cli.models import models
from oriel_inference.app import Unit, open_unit
from oriel_inference.settings import Settings
from oriel_policies.quality.reference import parse_reference

CONFIG = """
backend: "onnxruntime" max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
ROW = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}

Run = Callable[..., Any]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    shape = ("n", 4)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    (root / "double/1").mkdir(parents=True)
    save_model(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9),
        str(root / "double/1/model.onnx"),
    )
    (root / "double/config.pbtxt").write_text(CONFIG)
    (root / "broken/1").mkdir(parents=True)
    return root


@pytest.fixture
def settings(repository: Path) -> Settings:
    ports = {"http_port": 0, "grpc_port": None, "metrics_port": None}
    return Settings(repositories=(repository,), control_mode="explicit", strict_readiness=False, drain_s=5.0, **ports)


@pytest.fixture
async def unit(settings: Settings) -> AsyncIterator[Unit]:
    async with open_unit(settings) as running:
        yield running


@pytest.fixture
def oriel(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `oriel models ...`: (code, stdout) if it went well, (code, stderr) if not."""

    async def run(unit: Unit | str, *words: str) -> tuple[int, str]:
        url = unit if isinstance(unit, str) else f"http://127.0.0.1:{unit.http_port}"
        code = await asyncio.to_thread(main, ["models", *words, "--url", url])
        said = capsys.readouterr()
        assert not (said.out and said.err) and (code == 0 or said.err.count("\n") == 1)
        return code, said.out or said.err

    return run


async def test_a_models_life(unit: Unit, oriel: Run) -> None:
    assert await oriel(unit, "ls") == (
        0,
        "MODEL   VERSION  STATE  REASON\nbroken  -        -\ndouble  -        -\n",
    )
    assert await oriel(unit, "load", "double") == (0, "double is loaded\n")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{unit.http_port}", trust_env=False, timeout=60) as client:
        for body in (ROW, ROW, {"inputs": []}):
            await client.post("/v2/models/double/infer", json=body)
    _, table = await oriel(unit, "stats")
    heading, line = table.splitlines()
    assert heading.split() == ["MODEL", "VERSION", "REQUESTS", "FAILED", "QUEUE", "MS", "COMPUTE", "MS", "BATCH"]
    cells = line.split()
    assert cells[:3] == ["double", "1", "2"] and cells[6] == "1.00" and float(cells[5]) > 0
    assert (await oriel(unit, "stats", "double"))[1].count("\n") == 2
    _, answer = await oriel(unit, "stats", "double", "--json")
    assert json.loads(answer)[0]["inference_count"] == 2
    _, answer = await oriel(unit, "ls", "--ready", "--json")
    assert json.loads(answer) == [{"name": "double", "version": "1", "state": "READY", "reason": ""}]
    assert await oriel(unit, "unload", "double", "--json") == (0, '{"name": "double", "state": "unloaded"}\n')
    _, table = await oriel(unit, "ls")
    assert "double  1        UNAVAILABLE  unloaded" in table


async def test_a_load_with_files_and_either_form_of_configuration(
    unit: Unit, oriel: Run, repository: Path, tmp_path: Path
) -> None:
    config = tmp_path / "given.pbtxt"
    config.write_text(CONFIG.replace("max_batch_size: 8", "max_batch_size: 3"))
    file = f"1/model.onnx={repository / 'double/1/model.onnx'}"
    assert (await oriel(unit, "load", "other", "--config", str(config), "--file", file))[0] == 0
    assert unit.catalog.get("other").config.max_batch_size == 3
    config.write_text('{"backend": "onnxruntime", "max_batch_size": 2}')
    assert (await oriel(unit, "load", "double", "--config", str(config)))[0] == 0
    assert unit.catalog.get("double").config.max_batch_size == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["load", "absent"],
            "failed to load 'absent', failed to poll from model repository: no model repository has it",
        ),
        (["load", "broken"], "failed to load 'broken': "),
        (["load", "../etc"], "not a valid name"),
        (["unload", "absent"], "Request for unknown model: 'absent' is not loaded"),
        (["stats", "absent"], "Request for unknown model: 'absent' is not found"),
        (["load", "double", "--file", "model.onnx"], "the form is VERSION/PATH=LOCAL"),
        (["load", "double", "--file", "1/a=/dev/null"], "--file needs --config"),
        (["load", "double", "--file", "1/model.onnx=/absent"], "/absent cannot be read: No such file"),
        (["load", "double", "--config", "/absent"], "/absent cannot be read: No such file"),
        (["load", "double", "--config", "/proc/self/environ"], "environ"),
    ],
)
async def test_what_cannot_be_done_is_one_line(unit: Unit, oriel: Run, words: list[str], said: str) -> None:
    code, line = await oriel(unit, *words)
    assert code == 1 and line.startswith("oriel: ") and said in line


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:1", "nothing answers at http://127.0.0.1:1: is the server running there? Pass --url"),
        ("127.0.0.1:8000", "is not a URL such as http://127.0.0.1:8000"),
        ("ftp://x", "is not a URL such as"),
        ("http://[", "nothing answers at http://["),
    ],
)
async def test_an_address_where_nothing_listens(oriel: Run, url: str, said: str) -> None:
    code, line = await oriel(url, "ls")
    assert code == 1 and said in line


def through(monkeypatch: pytest.MonkeyPatch, handler: Callable[[httpx.Request], httpx.Response]) -> None:
    real = httpx.Client

    def client(**options: Any) -> httpx.Client:
        return real(transport=httpx.MockTransport(handler), base_url=options["base_url"])

    monkeypatch.setattr(models.httpx, "Client", client)


async def test_answers_as_triton_writes_them(monkeypatch: pytest.MonkeyPatch, oriel: Run) -> None:
    """An unloaded model has only a name; load and unload have no body; a server may write counts as text."""

    def triton(request: httpx.Request) -> httpx.Response:
        match request.url.path:
            case "/v2/repository/index":
                return httpx.Response(200, json=[{"name": "a"}, {"name": "b", "version": "1", "state": "READY"}])
            case "/v2/models/stats":
                counts = {"success": {"count": "2", "ns": "8000000"}, "queue": {"count": "2", "ns": "3000000"}}
                stats = {"name": "b", "version": "1", "inference_count": "6", "execution_count": "2"}
                return httpx.Response(200, json={"model_stats": [{**stats, "inference_stats": counts}, {"name": "a"}]})
            case "/v2/repository/models/b/unload":
                assert json.loads(request.content) == {"parameters": {"unload_dependents": True}}
                return httpx.Response(200)
        return httpx.Response(503, json={"error": "explicit model load / unload is not allowed if polling is enabled"})

    through(monkeypatch, triton)
    assert (await oriel("http://t", "ls"))[1].splitlines() == [
        "MODEL  VERSION  STATE  REASON",
        "a      -        -",
        "b      1        READY",
    ]
    assert (await oriel("http://t", "unload", "b", "--dependents")) == (0, "b is unloaded\n")
    assert (await oriel("http://t", "stats"))[1].splitlines()[1].split() == ["b", "1", "2", "0", "1.500", "-", "3.00"]
    code, line = await oriel("http://t", "load", "b")
    assert code == 1 and line.endswith("(start the server with --model-control-mode explicit)\n")


async def test_mean_batch_counts_rows_that_were_not_answered(monkeypatch: pytest.MonkeyPatch, oriel: Run) -> None:
    """A regression: the mean was 0.33, since this server counts only answered rows and callers left two batches."""
    sizes = [{"batch_size": "1", "compute_infer": {"count": "1"}}, {"batch_size": 4, "compute_infer": {"count": 2}}]
    stats = {"name": "b", "version": "1", "inference_count": "1", "execution_count": "3", "batch_stats": sizes}
    through(monkeypatch, lambda _: httpx.Response(200, json={"model_stats": [stats]}))
    assert (await oriel("http://t", "stats"))[1].splitlines()[1].split()[-1] == "3.00"


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"error": 7}', b""])
async def test_what_is_no_v2_server(monkeypatch: pytest.MonkeyPatch, oriel: Run, body: bytes) -> None:
    through(monkeypatch, lambda _: httpx.Response(404, content=body))
    code, line = await oriel("http://t", "ls")
    assert code == 1 and "answers 404 to /v2/repository/index: is this a v2 server's HTTP port?" in line


async def test_control_characters_of_a_server_do_not_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, oriel: Run
) -> None:
    through(monkeypatch, lambda _: httpx.Response(400, json={"error": "a\x1b[31m\nb"}))
    assert await oriel("http://t", "ls") == (1, "oriel: a?[31m b\n")


@pytest.fixture
async def sampled(settings: Settings) -> AsyncIterator[Unit]:
    """A server that has sampled 600 rows of `double`."""
    async with open_unit(replace(settings, control_mode="none", metrics_port=0)) as unit:
        quality = unit.surface.quality.of("double", 1)
        assert quality is not None
        for row in np.random.default_rng(1).normal(0.0, 1.0, (600, 4)):
            quality.count([("x", row, False), ("y", 2 * row, True)])
        yield unit


async def test_a_reference_is_written_beside_the_version(sampled: Unit, oriel: Run, repository: Path) -> None:
    url = f"http://127.0.0.1:{sampled.metrics_port}"
    code, out = await oriel(url, "reference", "double", "--model-repository", str(repository))
    path = repository / "double/1/reference.json"
    assert (code, out) == (0, f"{path} is written: x, y\n")
    assert set(parse_reference(path.read_text()).tensors) == {"x", "y"}
    _, printed = await oriel(url, "reference", "double", "--version", "1", "--json")
    assert parse_reference(printed).model == "double"
    _, table = await oriel(url, "quality", "double")
    heading, line = table.splitlines()[1:3]
    assert table.startswith("double version 1: 600 rows were sampled, no reference to compare them with\n")
    assert heading.split()[:4] == ["TENSOR", "ROWS", "PSI", "NOISE"] and line.split()[:4] == ["y", "600", "-", "-"]
    _, answer = await oriel(url, "quality", "double", "--json")
    assert json.loads(answer)["tensors"]["x"]["rows"] == 600


async def test_the_quality_of_a_model_without_samples_is_no_empty_table(settings: Settings, oriel: Run) -> None:
    async with open_unit(replace(settings, control_mode="none", metrics_port=0)) as unit:
        _, said = await oriel(f"http://127.0.0.1:{unit.metrics_port}", "quality", "double")
    assert said.splitlines()[1:] == ["there are no samples yet"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reference", "double"], "pass --model-repository DIR to write the file there, or --json to print it"),
        (["reference", "double", "--model-repository", "/nowhere"], "/nowhere/double/1 is not there"),
        (["reference", "absent", "--json"], "Request for unknown model: 'absent' is not found"),
        (["quality", "double", "--version", "7"], "'double' version 7 is not found"),
    ],
)
async def test_refusals_of_quality_say_why(sampled: Unit, oriel: Run, words: list[str], message: str) -> None:
    code, text = await oriel(f"http://127.0.0.1:{sampled.metrics_port}", *words)
    assert code != 0 and message in text


@pytest.mark.parametrize(
    ("words", "asked"),
    [("ls", "127.0.0.1:1"), ("stats", "127.0.0.1:1"), ("quality m", "127.0.0.1:2"), ("placement", "127.0.0.1:3")],
)
def test_the_running_platform_is_found_on_any_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, asked: str
) -> None:
    monkeypatch.setenv("ORIEL_STATE", str(tmp_path))
    running = {"gateway": "127.0.0.1:4", "inference": "127.0.0.1:1", "metrics": "127.0.0.1:2"}
    state.remember(state.Instance(pid=os.getpid(), admin_port=3, traces="", demo=False, **running))
    assert main(["models", *words.split()]) == 1
    assert f"nothing answers at http://{asked}:" in capsys.readouterr().err
