"""Sampled rows: which are taken, what is counted of them, references, and what a server shows."""

import threading
from collections import Counter
from dataclasses import replace
from math import inf, log
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_inference.batching.call import BatchTimes, Call
from oriel_inference.batching.statistics import Statistics
from oriel_inference.model import ModelSpec, TensorSpec
from oriel_inference.quality.sampler import QUEUE_ROWS, RATE, Quality, QualityThread, Row, VersionQuality
from oriel_inference.quality.tensor import MAX_VALUES, TensorProfile, entropy, numbers, part_of, probabilities
from oriel_inference.repository.compiling import _digest
from oriel_policies.quality.drift import ACT, MIN_ROWS, noise
from oriel_policies.quality.reference import REFERENCE_FILE, Reference, parse_reference
from oriel_wire.v2.messages import Array

from ..waiting import until
from . import models
from .bench import Bench
from .bench import spec as bench_spec
from .control_server import serving
from .exposed import read

EVERY_ROW = 'parameters { key: "oriel.quality.every" value { string_value: "1" } }'
DOUBLE = {"model": "double", "version": "1"}


def spec(*, every: int = 1, labels: tuple[str, ...] = (), parameters: dict[str, str] | None = None) -> ModelSpec:
    return ModelSpec(
        name="digits",
        version=1,
        platform="",
        backend="fake",
        max_batch_size=64,
        inputs=(TensorSpec(name="x", datatype="FP32", dims=(4,)), TensorSpec(name="t", datatype="BYTES", dims=(1,))),
        outputs=(TensorSpec(name="p", datatype="FP32", dims=(3,), labels=labels),),
        bounds=None,
        sample_every=every,
        parameters=parameters or {},
    )


class Kept:
    """Keeps what a sampler queues. full: it takes nothing."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.full = False

    def put(self, _: VersionQuality, row: Row) -> bool:
        if not self.full:
            self.rows.append(row)
        return not self.full


def call(x: Array) -> Call:
    return Call(inputs={"x": x}, rows=len(x), signature="", arrived_s=0.0, deadline=1.0, reply=lambda _: None)


def sampled(x: Array, p: Array, *, reference: Reference | None = None, of: ModelSpec | None = None) -> VersionQuality:
    """Return the samples of these rows, each of which was counted."""
    found = VersionQuality(of or spec(), reference, lambda *_: True, seed=1)
    for one, other in zip(x, p, strict=True):
        found.count([("x", one, False), ("p", other, True)])
    return found


# --- rows ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=50).filter(lambda each: sum(each) > 1e-6))
def test_entropy_is_between_nothing_and_everything(weights: list[float]) -> None:
    shares = np.asarray(weights) / sum(weights)
    assert 0.0 <= entropy(shares) <= 1.0
    assert entropy(np.full(len(weights), 1 / len(weights))) == pytest.approx(1.0)
    certain = np.zeros(len(weights))
    certain[0] = 1.0
    assert entropy(certain) == 0.0


def test_entropy_of_known_shares() -> None:
    assert entropy(np.array([0.5, 0.5, 0.0, 0.0])) == pytest.approx(log(2) / log(4))


@given(st.lists(st.floats(-1e30, 1e30), min_size=2, max_size=40))
def test_logits_become_a_distribution_with_the_same_largest_class(values: list[float]) -> None:
    row = np.asarray(values)
    found = probabilities(row, logits=True)
    assert found is not None and found.sum() == pytest.approx(1.0, abs=2e-3) and found.min() >= 0.0
    assert found[row.argmax()] == found.max()


def test_a_distribution_is_recognised_and_an_embedding_is_not() -> None:
    assert probabilities(np.array([0.2, 0.8]), logits=False) is not None
    for row in ([0.3, -0.4], [0.2, 0.3], [2.0, -1.0]):
        assert probabilities(np.array(row), logits=False) is None


def test_a_large_row_is_thinned_out_and_a_small_one_copied() -> None:
    large = np.arange(3 * 100_000, dtype=np.float32).reshape(3, 100_000)
    part = part_of(large, 1)
    assert MAX_VALUES // 2 < part.size <= MAX_VALUES and part[0] == 100_000 and np.all(np.diff(part) > 0)
    small = np.zeros((2, 2, 2), np.float32)
    copied = part_of(small, 0)
    small[:] = 1.0
    assert copied.shape == (4,) and not copied.any()
    assert part_of(np.float32(7).reshape(()), None).tolist() == [7.0]


def test_bf16_is_read_as_numbers() -> None:
    bits = (np.array([1.0, -2.5], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    assert numbers(bits, "BF16").tolist() == [1.0, -2.5]


# --- which rows are taken -----------------------------------------------------------------------------------------


def test_about_one_row_in_so_many_is_taken_whatever_the_batches() -> None:
    kept, now = Kept(), 0.0
    quality = VersionQuality(spec(every=100), None, kept.put, now=lambda: now, seed=5)
    done, at = 0, quality.first(0)
    sizes = np.random.default_rng(1).integers(1, 64, 4000)
    for size in sizes.tolist():
        now += 0.1
        done += size
        x = np.arange(done - size, done, dtype=np.float32).repeat(4).reshape(size, 4)
        if done >= at:
            at = quality.offer(quality.spec, done, at, [call(x)], [[np.full((size, 3), 1 / 3, np.float32)]])
            assert at > done
    assert len(kept.rows) == pytest.approx(done / 100, rel=0.15)
    numbers_taken = [row[0][1][0] for row in kept.rows]
    assert numbers_taken == sorted(set(numbers_taken)), "no row twice, none from another place"


def test_the_row_is_found_in_its_call_with_its_own_outputs() -> None:
    kept = Kept()
    quality = VersionQuality(spec(), None, kept.put, now=lambda: 0.0)
    calls = [call(np.full((2, 4), 1, np.float32)), call(np.full((3, 4), 2, np.float32))]
    shares = [[np.full((2, 3), 10, np.float32)], [np.full((3, 3), 20, np.float32)]]
    assert quality.offer(quality.spec, 5, 3, calls, shares) == 6
    assert [[(name, array[0], classes) for name, array, classes in row] for row in kept.rows] == [
        [("x", 2.0, False), ("p", 20.0, True)]
    ] * 3


def test_no_more_than_so_many_rows_a_second_are_taken_and_the_rest_is_counted() -> None:
    kept, now = Kept(), 0.0
    quality = VersionQuality(spec(), None, kept.put, now=lambda: now)
    one = [call(np.zeros((1, 4), np.float32))], [[np.zeros((1, 3), np.float32)]]
    at = 1.0
    for number in range(1, 2 * RATE + 1):
        at = quality.offer(quality.spec, number, at, *one) if number >= at else at
    assert len(kept.rows) == RATE and quality.samples["limited"] == RATE
    now = 1.0
    quality.offer(quality.spec, 2 * RATE + 1, at, *one)
    assert len(kept.rows) == RATE + 1


def test_a_full_queue_drops_rows_and_counts_them() -> None:
    kept = Kept()
    kept.full = True
    quality = VersionQuality(spec(), None, kept.put, now=lambda: 0.0)
    quality.offer(quality.spec, 1, 1, [call(np.zeros((1, 4), np.float32))], [[np.zeros((1, 3), np.float32)]])
    assert quality.samples == Counter(counted=0, dropped=1, limited=0)


def test_the_queue_is_bounded_and_its_thread_ends() -> None:
    thread = QualityThread()
    stuck = VersionQuality(spec(), None, thread.put)
    with stuck._lock:  # the thread waits with the first row
        taken = sum(thread.put(stuck, []) for _ in range(QUEUE_ROWS + 10))
        assert QUEUE_ROWS <= taken <= QUEUE_ROWS + 1
    thread.close(60.0)
    assert not thread._thread.is_alive()  # type: ignore[union-attr]


def test_an_unexpected_error_ends_the_sampling_and_not_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> bool:
        raise RuntimeError("no room")

    quality = VersionQuality(spec(), None, broken)
    assert (
        quality.offer(quality.spec, 1, 1, [call(np.zeros((1, 4), np.float32))], [[np.zeros((1, 3), np.float32)]]) == inf
    )
    assert "a sampled row could not be counted" in caplog.text


def test_a_batcher_offers_its_rows_with_their_answers() -> None:
    kept = Kept()
    bench = Bench(of := bench_spec())
    statistics = bench.batcher.statistics
    statistics.offer = VersionQuality(of, None, kept.put, now=lambda: 0.0).offer
    statistics.sample_at = 5
    for _ in range(2):
        bench.call(3)
    bench.settle()
    assert bench.batches == [6]
    (x, sent, _), (y, answered, _) = kept.rows[0]
    assert (x, y) == ("x", "y") and sent.tolist() == [1, 1] and answered.tolist() == [2, 2]
    assert statistics.sample_at > 6


def test_what_a_load_still_answers_is_no_sample_of_the_next_one() -> None:
    """Its shapes may be others, and its rows say nothing of the model that takes its place."""
    kept, statistics, old = Kept(), Statistics(), spec()
    new = replace(old, inputs=(TensorSpec(name="x", datatype="FP32", dims=(2,)),))
    statistics.offer = VersionQuality(new, None, kept.put, now=lambda: 0.0, seed=1).offer
    statistics.sample_at, shares = 1, [[np.zeros((2, 3), np.float32)]]
    times = BatchTimes(0.0, 0.0, 0.0, 0.0, 2)
    statistics.executed(times, 1, [call(np.zeros((2, 4), np.float32))], shares, old)
    statistics.executed(times, 1, [call(np.zeros((2, 4), np.float32))], shares, old)
    assert kept.rows == []
    x = np.array([[5, 5], [6, 6]], np.float32)
    statistics.executed(times, 1, [call(x)], shares, new)
    assert [row[0][1].tolist() for row in kept.rows] == x.tolist(), "each row once"


# --- what is counted ----------------------------------------------------------------------------------------------


def test_odd_values_moments_and_confidence_are_those_of_the_rows() -> None:
    values = np.random.default_rng(2)
    x = values.normal(3.0, 2.0, (600, 4)).astype(np.float32)
    x[0, 0], x[1, 1], x[2, 2] = np.nan, np.inf, -np.inf
    p = np.tile(np.array([0.1, 0.7, 0.2], np.float32), (600, 1))
    states = sampled(x, p).states()
    finite = x[np.isfinite(x)].astype(np.float64)
    state = states["x"]
    assert state.rows == 600 and state.odd == {"nan": 1 / 2400, "infinite": 2 / 2400, "out_of_range": 0.0}
    assert state.mean == pytest.approx(finite.mean()) and state.deviation == pytest.approx(finite.std(), rel=1e-6)
    assert (state.confidence, state.classes, state.psi) == (None, {}, None)
    answered = states["p"]
    assert answered.confidence == pytest.approx(0.7, abs=1e-6) and answered.classes == {1: 1.0}
    assert answered.entropy == pytest.approx(entropy(np.array([0.1, 0.7, 0.2])), abs=1e-6)


def test_classes_of_few_rows_are_not_shown() -> None:
    p = np.eye(3, dtype=np.float32)[[0] * 19 + [1] * 20 + [2] * 61]
    assert sampled(np.zeros((100, 4), np.float32), p).states()["p"].classes == {1: 0.2, 2: 0.61}


def test_logits_need_labels_or_a_parameter() -> None:
    logits = np.array([[2.0, -1.0, 0.5]] * 30, np.float32)
    x = np.zeros((30, 4), np.float32)
    assert sampled(x, logits).states()["p"].confidence is None
    for of in (spec(labels=("a", "b", "c")), spec(parameters={"oriel.quality.logits": "other, p"})):
        expected = float(np.exp(2.0) / np.exp([2.0, -1.0, 0.5]).sum())
        assert sampled(x, logits, of=of).states()["p"].confidence == pytest.approx(expected)


def test_a_reference_tells_a_shift_from_chance_for_inputs_and_classes() -> None:
    values = np.random.default_rng(4)

    def rows(count: int, mean: float, weights: list[float]) -> tuple[Array, Array]:
        x = values.normal(mean, 1.0, (count, 4)).astype(np.float32)
        return x, np.eye(3, dtype=np.float32)[values.choice(3, count, p=weights)]

    usual = [0.5, 0.3, 0.2]
    made = sampled(*rows(1200, 0.0, usual)).reference("now")
    assert made is not None and set(made.tensors) == {"x", "p"}
    assert parse_reference(made.encode()) == made
    few = sampled(*rows(MIN_ROWS - 1, 0.0, usual), reference=made)
    assert few.drift() == {}, "not before there are enough rows"
    same = sampled(*rows(1000, 0.0, usual), reference=made).drift()
    assert same["x"][1] == pytest.approx(noise(10, 1000, made.tensors["x"].rows))
    assert all(found < 3 * chance for found, chance in same.values())
    moved = sampled(*rows(800, 1.0, [0.1, 0.3, 0.6]), reference=made).drift()
    assert all(found - chance > ACT for found, chance in moved.values())


def test_a_reference_holds_no_value_of_a_row() -> None:
    x = np.random.default_rng(6).normal(0.0, 1.0, (800, 4)).astype(np.float32)
    made = sampled(x, np.eye(3, dtype=np.float32)[[0] * 800]).reference("now")
    assert made is not None
    tensor = made.tensors["x"]
    numbers_of = {*tensor.edges, tensor.low, tensor.high, tensor.mean, tensor.deviation}
    assert len(tensor.edges) == 9 and not numbers_of & set(x.astype(np.float64).ravel().tolist())


def test_values_outside_the_range_of_the_reference_are_odd() -> None:
    p = np.eye(3, dtype=np.float32)[[0] * 600]
    made = sampled(np.tile(np.linspace(0, 10, 4, dtype=np.float32), (600, 1)), p).reference("now")
    assert made is not None
    later = sampled(np.array([[0.0, 10.0, 10.5, -1.0]], np.float32), p[:1], reference=made)
    assert later.totals["x"].odd == Counter(nan=0, infinite=0, out_of_range=2)


def test_only_the_latest_rows_count_for_drift() -> None:
    p = np.eye(3, dtype=np.float32)[[0] * 600]
    made = sampled(np.random.default_rng(1).normal(0, 1, (600, 4)), p).reference("now")
    assert made is not None
    quality = sampled(np.full((600, 4), 9.0), p, reference=made)
    assert quality.drift()["x"][0] > ACT
    for row in np.random.default_rng(2).normal(0, 1, (6000, 4)):
        quality.count([("x", row, False)])
    assert quality.drift()["x"][0] < ACT / 2
    assert quality.totals["x"].odd["out_of_range"] >= 2400, "totals go on"


# --- versions -----------------------------------------------------------------------------------------------------


def test_a_version_that_is_loaded_again_counts_on_and_the_number_of_versions_is_bounded() -> None:
    serving_now = {("digits", 1), ("other", 1)}
    quality = Quality(lambda *key: key in serving_now, max_versions=2)
    statistics = Statistics()
    quality.open(spec(), statistics, None)
    first = quality.of("digits", 1)
    assert first is not None and statistics.offer == first.offer and statistics.sample_at == 1
    first.count([("x", np.array([np.nan]), False)])
    quality.open(spec(), statistics, None)
    again = quality.of("digits", 1)
    assert again is not None and again is not first and again.totals["x"].odd["nan"] == 1

    def opened(name: str) -> bool:
        quality.open(replace(spec(), name=name), Statistics(), None)
        return quality.of(name, 1) is not None

    assert opened("other") and not opened("third"), "both of the known ones serve"
    serving_now.discard(("digits", 1))
    assert opened("third") and quality.of("digits", 1) is None
    assert statistics.offer is None and statistics.sample_at == inf


def test_a_configuration_may_say_that_nothing_is_sampled() -> None:
    quality, statistics = Quality(lambda *_: True), Statistics()
    quality.open(spec(every=0), statistics, None)
    assert quality.of("digits", 1) is None and statistics.sample_at == inf


def test_a_reference_does_not_change_the_artefact_of_its_version(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"model")
    before = _digest(tmp_path / "model.onnx")
    (tmp_path / REFERENCE_FILE).write_text("{}")
    assert _digest(tmp_path / "model.onnx") == before
    (tmp_path / "weights.bin").write_bytes(b"w")
    assert _digest(tmp_path / "model.onnx") != before


# --- a server -----------------------------------------------------------------------------------------------------


def rows_of(values: Array) -> dict[str, Any]:
    tensor = {"name": "x", "shape": list(values.shape), "datatype": "FP32", "data": values.ravel().tolist()}
    return {"inputs": [tensor]}


async def test_a_server_samples_shows_and_compares_with_a_reference_that_it_made(tmp_path: Path) -> None:
    models.put(tmp_path, "double", models.double(), models.DOUBLE + EVERY_ROW)
    values = np.random.default_rng(3)
    async with serving(tmp_path, "poll") as served:
        unit = served.unit
        metrics = f"http://127.0.0.1:{unit.metrics_port}"
        async with httpx.AsyncClient(base_url=metrics, trust_env=False, timeout=60) as client:

            async def counted() -> bool:
                return (await read(unit)).value("oriel_model_sampled_rows_total", result="counted", **DOUBLE) >= 3

            for _ in range(3):
                assert (await served.client.post("/v2/models/double/infer", json=rows_of(np.ones((1, 4))))).is_success
            await until(counted)
            shown = (await client.get("/quality/double")).json()
            assert shown["reference"] is False and shown["tensors"]["y"]["mean"] == 2.0
            refused = await client.get("/quality/double/reference")
            assert refused.status_code == 409 and "a reference needs 500" in refused.json()["error"]
            assert (await client.get("/quality/absent")).status_code == 404

            before = unit.surface.quality.of("double", 1)
            assert before is not None
            for row in values.normal(0.0, 1.0, (600, 4)):
                before.count([("x", row, False), ("y", 2 * row, True)])
            answer = await client.get("/quality/double/reference?version=1")
            assert answer.status_code == 200
            (tmp_path / "double/1" / REFERENCE_FILE).write_text(answer.text)
            await until(lambda: (found := unit.surface.quality.of("double", 1)) is not None and found.has_reference)

            after = unit.surface.quality.of("double", 1)
            assert after is not None and after is not before
            for row in values.normal(2.0, 1.0, (600, 4)):
                after.count([("x", row, False), ("y", 2 * row, True)])
            found = await read(unit)
            for tensor in ("x", "y"):
                psi = found.value("oriel_model_drift_psi", tensor=tensor, **DOUBLE)
                assert psi - found.value("oriel_model_drift_noise", tensor=tensor, **DOUBLE) > ACT


async def test_a_reference_is_made_in_a_thread_and_for_one_tensor_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sorts the samples of all tensors, and held the loop up meanwhile."""
    made, threads = TensorProfile.reference, set[threading.Thread]()
    models.put(tmp_path, "double", models.double(), models.DOUBLE + EVERY_ROW)
    async with serving(tmp_path, "none") as served:
        quality = served.unit.surface.quality.of("double", 1)
        assert quality is not None
        lock = Taken(quality._lock)
        monkeypatch.setattr(quality, "_lock", lock)

        def noted(self: TensorProfile) -> Any:
            threads.add(threading.current_thread())
            return made(self)

        monkeypatch.setattr(TensorProfile, "reference", noted)
        url = f"http://127.0.0.1:{served.unit.metrics_port}/quality/double/reference"
        assert (await served.client.get(url)).status_code == 409, "there are too few rows"
    assert threads and threading.main_thread() not in threads
    assert lock.times == 2


class Taken:
    """A lock that counts how often it was taken."""

    def __init__(self, lock: Any) -> None:
        self.lock, self.times = lock, 0

    def __enter__(self) -> None:
        self.times += 1
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


@pytest.mark.parametrize("text", ["{", "[1]", '{"model": "double", "version": "1", "tensors": {"x": {"rows": 3}}}'])
async def test_a_wrong_reference_is_reported_and_the_model_serves(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    (tmp_path / "double/1" / REFERENCE_FILE).write_text(text)
    async with serving(tmp_path, "none") as served:
        assert await served.answer() == 2.0
    assert "double/1/reference.json is not used: " in caplog.text


async def test_a_wrong_parameter_names_itself(tmp_path: Path) -> None:
    wrong = EVERY_ROW.replace('"1"', '"often"')
    models.put(tmp_path, "double", models.double(), models.DOUBLE + wrong)
    async with serving(tmp_path, "none", strict_readiness=False) as served:
        (line,) = (await served.lines()).values()
        assert "parameters['oriel.quality.every']" in line[1] and "0 (no samples)" in line[1]
