"""`oriel models compare`: the variants of a model beside the model itself."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeSession, Gate

from oriel_cli.main import main
from oriel_inference.artefacts.compare import ComparisonOptions, compare, take_turns
from oriel_inference.backends import OutsideProfile
from oriel_inference.errors import BackendFailed, InferenceError
from oriel_inference.model import TensorInfo
from oriel_inference.repository.load import LoadedVersion

from ..inference.artefact_server import served
from ..inference.control_server import put, times
from ..inference.models import DOUBLE, save_model

QUICK = ["--runs", "3", "--cores", "1", "--batch", "1", "--batch", "4"]


def variant(root: Path, name: str, factor: float) -> None:
    save_model(times(factor), str(root / "double/1" / f"model.{name}.onnx"))


def test_each_variant_has_its_error_and_its_time_per_batch_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = 'parameters { key: "oriel.variant" value { string_value: "int8" } }'
    put(tmp_path, 2.0, config=DOUBLE + chosen)
    variant(tmp_path, "fp16", 2.001)
    variant(tmp_path, "int8", 4.0)
    command = ["models", "compare", "double", "--repository", str(tmp_path), *QUICK]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["version"]) == ("double", 1)
    fp32, fp16, int8 = found["variants"]
    assert [each["name"] for each in found["variants"]] == ["fp32", "fp16", "int8"]
    assert (fp32["state"], fp16["state"], int8["state"]) == ("reference", "agrees", "differs")
    assert fp16["relative"] == pytest.approx(0.0005, rel=1e-3) and int8["relative"] == pytest.approx(1.0)
    assert fp16["top1"] == 1.0 and fp16["samples"] == 2
    assert "output 'y' differs in " in int8["reason"], "it would not serve"
    for each in found["variants"]:
        assert list(each["median_ms"]) == list(each["cpu_ms"]) == ["1", "4"]
        assert all(ms > 0 for ms in each["median_ms"].values())
    assert main(command) == 0
    first, heading, *rows = capsys.readouterr().out.splitlines()
    assert first == "double/1, compared over 2 samples"
    assert heading.split("  ")[0] == "VARIANT" and "4 ROWS MS" in heading and heading.endswith("REASON")
    assert [row.split()[:2] for row in rows] == [["fp32", "reference"], ["fp16", "agrees"], ["int8", "differs"]]


def test_compilers_are_compared_on_demand_and_one_that_refuses_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, 2.0, config=DOUBLE)
    variant(tmp_path, "bf16", 2.0)
    (tmp_path / "double/1/model.int8.onnx").write_bytes(b"junk")
    more = ["--compiler", "onnxruntime-graph", "--json"]
    assert main(["models", "compare", "double", "--repository", str(tmp_path), *QUICK, *more]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["variants"]}
    assert list(found) == ["fp32", "bf16", "int8", "onnxruntime-graph"]
    assert found["onnxruntime-graph"]["state"] == "agrees" and found["onnxruntime-graph"]["absolute"] == 0.0
    assert found["int8"]["state"] == "failed" and "is not a whole ONNX file" in found["int8"]["reason"]
    assert found["int8"]["median_ms"] == {} and found["int8"]["absolute"] is None


@pytest.mark.parametrize(("error", "state"), [(OutsideProfile, "agrees"), (BackendFailed, "failed")])
def test_one_that_does_not_run_a_batch_size_is_timed_with_the_others(
    tmp_path: Path, error: type[InferenceError], state: str
) -> None:
    """It ended the comparison of all of them."""
    put(tmp_path, 2.0, config=DOUBLE)

    def small_only(loaded: LoadedVersion) -> Any:
        own = loaded.sessions[0]

        def run(inputs: Any, outputs: Any) -> Any:
            if len(inputs["x"]) > 4:
                raise error("it is too large")
            return own.run(inputs, outputs)

        return SimpleNamespace(
            run=run, close=lambda: None, inputs=own.inputs, outputs=own.outputs, provider=own.provider
        )

    reference, found = compare(
        tmp_path, "double", ComparisonOptions(batches=(1, 8), runs=3), served=small_only
    ).contestants
    assert list(reference.median_ms) == [1, 8] and list(found.median_ms) == [1]
    assert (found.state, found.reason) == (state, "8 rows cannot be run: it is too large")


async def test_the_answers_of_a_running_server_are_compared_with_the_model_at_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, factor in (("here", 2.0), ("there", 2.0), ("elsewhere", 3.0)):
        put(tmp_path / folder, factor, config=DOUBLE)
    command = ["models", "compare", "double", "--repository", str(tmp_path / "here"), *QUICK, "--json", "--url"]
    for folder, state in (("there", "agrees"), ("elsewhere", "differs")):
        async with served(tmp_path / folder, tmp_path / "artefacts") as one:
            assert await asyncio.to_thread(main, [*command, str(one.client.base_url)]) == 0
            reference, found = json.loads(capsys.readouterr().out)["variants"]
        assert (reference["name"], found["name"], found["state"]) == ("fp32", "served", state)
        assert found["samples"] == 2 and list(found["median_ms"]) == ["1", "4"]
    assert await asyncio.to_thread(main, [*command, str(one.client.base_url)]) == 0, "it is gone"
    _, found = json.loads(capsys.readouterr().out)["variants"]
    assert found["state"] == "failed" and "the server does not answer" in found["reason"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["double"], "double/1 has no variants beside its model file: model.fp16.onnx, model.bf16.onnx, "),
        (["double", "--compiler", "tvm"], "'tvm' is not one of onnxruntime-graph, openvino"),
        (["nothing"], "nothing"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, 2.0, config=DOUBLE)
    assert main(["models", "compare", *words, "--repository", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and reason in captured.err.splitlines()[-1]


def test_a_batch_that_is_too_large_costs_its_own_times_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The comparison of minutes was lost when one of the batch sizes was larger than the model takes."""
    put(tmp_path, 2.0, config=DOUBLE)
    words = ["double", "--compiler", "onnxruntime-graph", "--batch", "9", "--batch", "2", "--runs", "1"]
    assert main(["models", "compare", *words, "--repository", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "agrees" in captured.out and "2 ROWS MS" in captured.out and "9 ROWS MS" not in captured.out
    assert captured.err.splitlines()[-1].endswith("double takes batches of 1 to 8 rows, not 9")


def test_the_sessions_take_turns_and_each_second_round_is_reversed() -> None:
    order: list[str] = []

    class Named(FakeSession):
        def __init__(self, name: str) -> None:
            x, y = (TensorInfo(name=each, datatype="FP32", shape=(-1, 4)) for each in "xy")
            super().__init__((x,), (y,), gate=Gate())
            self.name = name

        def run(self, inputs, outputs):  # type: ignore[no-untyped-def]
            order.append(self.name)
            return super().run(inputs, outputs)

    def failed(name: str, error: InferenceError) -> None:
        raise error

    sessions = {"a": Named("a"), "b": Named("b")}
    found = take_turns(sessions, {"x": np.ones((1, 4), np.float32)}, runs=4, seconds=1e9, failed=failed)
    assert "".join(order) == "baabbaabbaab" and list(found) == ["a", "b"]
    take_turns(sessions, {"x": np.ones((1, 4), np.float32)}, runs=1000, seconds=0.0, failed=failed)
    assert len(order) == 12 + 2 * 5, "the fewest runs when the time is over"
