"""`oriel simulate profile` against the real server."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, save_model

from oriel_cli.demo.closed_loop import Figures, Shot, drive
from oriel_cli.errors import CommandFailed
from oriel_cli.main import main
from oriel_inference.app import open_unit
from oriel_inference.settings import Settings
from oriel_tools.simulate import calibrate
from oriel_tools.simulate.calibrate import Counts, callers_of, loop_of, loop_times, measured, together
from oriel_tools.simulate.profile import LoopMs, read
from oriel_wire.engine.client import HttpClient

CONFIG = """
backend: "onnxruntime" max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
dynamic_batching { max_queue_delay_microseconds: 2000 preferred_batch_size: [ 2 ] }
"""


async def driven(client: HttpClient, shot: Shot, *, duration_s: float, **more: Any) -> Figures:
    """Send for twice the time until enough is answered, or something refused: no time is enough on a busy machine."""
    while True:
        figures = await drive(client, shot, duration_s=duration_s, **more)
        if len(figures.latencies_s) >= 2 * calibrate.OFTEN or figures.others:
            return figures
        duration_s *= 2


@pytest.fixture
async def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr(calibrate, "drive", driven)
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
    assert profile.sizes[0].rows == 1 and all(size.mean_ms > 0.0 for size in profile.sizes)
    assert profile.overhead_ms + profile.row_ms > 0.0 and all(len(size.spread) > 1 for size in profile.sizes)
    assert profile.loop.alone_ms > 0.0, "the server says how long its event loop was busy"
    load = ["--profile", str(out), "--rate", "50", "--seconds", "1", "--json"]
    assert await asyncio.to_thread(main, ["simulate", "serve", *load]) == 0
    assert json.loads(capsys.readouterr().out)["phases"][0]["all"]["scheduled"] > 0


async def test_executions_that_can_run_at_once_count_if_they_are_known(url: str) -> None:
    """Two that are in each other's way keep fewer than two busy on average, and are still two."""
    assert (await measured(url, "double", seconds=0.05, instances=2)).instances == 2


async def test_a_model_that_is_not_there_is_refused(url: str) -> None:
    with pytest.raises(CommandFailed, match="404"):
        await measured(url, "nobody", seconds=0.1)


async def test_statistics_that_fail_during_a_turn_are_one_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the task that reads them beside the load was a traceback of an ExceptionGroup."""
    read_statistics, reads = calibrate._statistics, count()

    async def failing(client: HttpClient, model: str) -> calibrate._Statistics:
        if next(reads):
            raise CommandFailed("the server answers 503 to its statistics")
        return await read_statistics(client, model)

    monkeypatch.setattr(calibrate, "_statistics", failing)
    with pytest.raises(CommandFailed, match="503"):
        await measured(url, "double", seconds=0.05)


@given(st.lists(st.tuples(st.integers(1, 9999), st.integers(1, 9999)), min_size=2), st.floats(0, 1), st.floats(0, 1))
def test_the_times_of_the_loop_follow_from_turns(turns: list[tuple[int, int]], call_s: float, batch_s: float) -> None:
    seconds = [call_s * calls + batch_s * batches for calls, batches in turns]
    found = loop_times([(s, calls, batches) for s, (calls, batches) in zip(seconds, turns, strict=True)])
    assert min(found) >= 0.0
    again = [found[0] * calls + found[1] * batches for calls, batches in turns]
    assert again == pytest.approx(seconds, rel=1e-6, abs=1e-6)


def turn(loop_s: float | None, calls: int, batches: dict[int, Counts]) -> calibrate._Turn:
    return calibrate._Turn(elapsed_s=1.0, loop_s=loop_s, latencies_s=[0.01] * calls, counts=batches, single=[])


def test_the_loop_of_a_server_is_what_its_turns_and_calls_and_batches_come_to() -> None:
    """A turn takes 1 ms, a call 2 and a batch 3; a batch of one row runs on the loop and takes 0.2 ms there."""
    alone, crowded = {1: Counts(10, 0.002)}, {1: Counts(10, 0.002), 4: Counts(10, 0.1)}
    turns = [
        turn(10 * (0.002 + 0.003 + 3 * 0.001) + 0.002, 10, alone),
        turn(50 * (0.002 + 0.001) + 20 * (0.003 + 2 * 0.001) + 0.002, 50, crowded),
        turn(80 * 0.002 + 20 * (0.003 + 2 * 0.001), 80, {4: Counts(20, 0.2)}),
    ]
    found = loop_of(turns, 0.001)
    assert (found.turn_ms, found.call_ms, found.batch_ms) == pytest.approx((1.0, 2.0, 3.0))
    assert loop_of([*turns, turn(None, 10, alone)], 0.001) == LoopMs()


def test_no_time_of_the_loop_is_negative() -> None:
    assert loop_times([(1.0, 10, 10), (1.0, 20, 10)]) == (pytest.approx(0.0), pytest.approx(0.1))
    call_s, batch_s = loop_times([(1.0, 10, 10), (2.1, 20, 10)])
    assert call_s == pytest.approx(0.104) and batch_s == 0.0
    assert loop_times([(-1.0, 10, 10)]) == (0.0, 0.0)


def test_turns_are_added_up_and_larger_batches_are_never_quicker() -> None:
    turns = [{1: Counts(100, 0.1), 2: Counts(100, 0.4)}, {2: Counts(100, 0.2), 4: Counts(100, 0.2)}]
    found = together(turns)
    assert {rows: batches for rows, (batches, _) in found.items()} == {1: 100, 2: 200, 4: 100}
    assert [mean_s for _, mean_s in found.values()] == pytest.approx([0.001, 0.8 / 300, 0.8 / 300])


def test_neighbouring_sizes_that_were_seen_rarely_are_taken_together() -> None:
    found = together(
        [{1: Counts(20, 0.02), 4: Counts(4, 0.04), 5: Counts(4, 0.04), 6: Counts(4, 0.04), 9: Counts(3, 0.09)}]
    )
    assert found == {1: (20, pytest.approx(0.001)), 6: (15, pytest.approx(0.014))}, "87 rows in 15 batches"
    assert together([{1: Counts(3, 0.3), 2: Counts(1, 0.9)}]) == {1: (4, pytest.approx(0.3))}


@given(
    st.dictionaries(st.integers(1, 300), st.builds(Counts, st.integers(1, 40), st.floats(1e-6, 10.0)), min_size=1),
)
def test_no_batch_is_lost_of_sizes_that_are_taken_together(counts: dict[int, Counts]) -> None:
    found = together([counts])
    assert list(found) == sorted(found) and min(counts) <= min(found) and max(found) <= max(counts)
    if len(counts) <= calibrate.MOST_SIZES:
        assert sum([batches for batches, _ in found.values()]) == sum([each.batches for each in counts.values()])
    assert len(found) == 1 or all(batches >= calibrate.OFTEN for batches, _ in found.values())
    means = [mean_s for _, mean_s in found.values()]
    assert means == sorted(means)


def test_the_spread_is_that_of_one_size_or_of_all_or_of_the_answers() -> None:
    sizes, answers = {1: 0.001, 4: 0.002}, [0.001, 0.003]
    often = [(4, 0.0018), (4, 0.0022)] * 30
    found = calibrate._spreads(sizes, [*often, (1, 0.002)], answers)
    assert (found[4][0], found[4][-1]) == (0.9, 1.1), "4 was seen often enough"
    assert found[1][-1] > 1.5, "1 was not: batches of all sizes, of which one took twice its mean"
    few = calibrate._spreads(sizes, often[:8], answers)
    assert few[1] == few[4] and (few[1][0], few[1][-1]) == (0.5, 1.5)


async def test_callers_that_think_send_less(url: str) -> None:
    shot = await calibrate._shot(url, "double", 1)
    client = HttpClient(host="127.0.0.1", port=int(url.rpartition(":")[2]))
    busy = await drive(client, shot, callers=2, duration_s=0.3)
    thinking = await drive(client, shot, callers=2, duration_s=0.3, think_s=0.1)
    none = await drive(client, shot, callers=2, duration_s=0.01, think_s=1e6)
    await client.close()
    assert not busy.others and not thinking.others
    assert 0 < len(thinking.latencies_s) < len(busy.latencies_s) and not none.latencies_s


def test_callers_double_until_they_fill_two_of_the_largest_batches() -> None:
    assert callers_of(0, 1) == callers_of(1, 1) == [2]
    assert callers_of(12, 1) == [2, 4, 8, 16]
    assert callers_of(64, 4) == [2, 4, 8, 16, 32]
    assert callers_of(65_536, 1)[-1] == 256
