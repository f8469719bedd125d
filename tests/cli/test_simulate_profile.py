"""`oriel simulate profile` against the real server."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from onnx import TensorProto, helper, save_model

from oriel_cli.errors import CommandFailed
from oriel_cli.main import main
from oriel_cli.simulate.calibrate import _Counts, _merged, _sizes, measured
from oriel_cli.simulate.profile import read
from oriel_inference.app import open_unit
from oriel_inference.settings import Settings

CONFIG = """
backend: "onnxruntime" max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
dynamic_batching { max_queue_delay_microseconds: 2000 preferred_batch_size: [ 2 ] }
"""


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    (tmp_path / "models/double/1").mkdir(parents=True)
    (tmp_path / "models/double/config.pbtxt").write_text(CONFIG)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("n", 4))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("n", 4))],
    )
    opsets = [helper.make_opsetid("", 17)]
    save_model(
        helper.make_model(graph, opset_imports=opsets, ir_version=9), str(tmp_path / "models/double/1/model.onnx")
    )
    ports = {"http_port": 0, "grpc_port": None, "metrics_port": None}
    async with open_unit(Settings(repositories=(tmp_path / "models",), drain_s=5.0, **ports)) as unit:
        yield f"http://127.0.0.1:{unit.http_port}"


async def test_a_profile_is_measured_and_can_be_simulated(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "double.json"
    flags = ["double", "--url", url, "--seconds", "0.1", "--out", str(out), "--device-class", "t4"]
    assert await asyncio.to_thread(main, ["simulate", "profile", *flags]) == 0
    assert "double: batches of N rows take" in capsys.readouterr().out
    profile = read(out)
    assert (profile.max_rows, profile.max_delay_ms, profile.preferred_rows) == (4, 2.0, [2])
    assert profile.device_class == "t4" and profile.measured and profile.server.startswith(url)
    assert {1, 2, 4} <= {size.rows for size in profile.sizes} and all(size.mean_ms > 0.0 for size in profile.sizes)
    assert profile.overhead_ms + profile.row_ms > 0.0 and all(len(size.spread) > 1 for size in profile.sizes)
    load = ["--profile", str(out), "--rate", "50", "--seconds", "1", "--json"]
    assert await asyncio.to_thread(main, ["simulate", "serve", *load]) == 0
    assert json.loads(capsys.readouterr().out)["phases"][0]["all"]["scheduled"] > 0


async def test_a_model_that_is_not_there_is_refused(url: str) -> None:
    with pytest.raises(CommandFailed, match="404"):
        await measured(url, "nobody", seconds=0.1)


def test_times_under_load_count_where_they_were_seen_often() -> None:
    alone = [{1: _Counts(10, 0.010)}, {4: _Counts(10, 0.020)}, {8: _Counts(10, 0.030)}]
    found = _merged(alone, {4: _Counts(100, 0.300), 3: _Counts(5, 9.0)})
    assert {rows: seconds / batches for rows, (batches, seconds) in found.items()} == pytest.approx(
        {1: 0.0015, 4: 0.003, 8: 0.0045}
    ), "five batches of 3 rows are too few; sizes that were not seen under load are as much slower as size 4"


def test_sizes_double_up_to_the_largest_batch() -> None:
    assert _sizes(1) == [1]
    assert _sizes(12) == [1, 2, 4, 8, 12]
    assert len(_sizes(65_536)) == 12 and _sizes(65_536)[-1] == 65_536
