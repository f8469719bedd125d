"""Tensors that stay in the memory of a device: what a view is, what a session leaves there and takes from there, and
how they go through the steps of an ensemble.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto

from oriel_inference.backends.device_tensor import ALIGNMENT, DeviceTensor, joined_on, on_host, usable_on
from oriel_inference.batching.assemble import concatenate
from oriel_inference.batching.call import Call
from oriel_inference.errors import BackendFailed, InvalidRequest
from oriel_inference.quality.sampler import VersionQuality

from . import models
from .ensembles import CHAIN, DIAMOND, Flights, ensemble, model
from .resident import MEMORY, Resident, doubles, opened, same, tensor

WIDE = ALIGNMENT // 8  # columns of INT64 whose rows begin where the device can take them
ELSEWHERE = ("cuda", 1)


def rows(count: int, first: int = 0, columns: int = WIDE) -> np.ndarray[Any, Any]:
    return np.arange(first, first + count * columns, dtype=np.int64).reshape(count, columns)


# Views --------------------------------------------------------------------------------------------------------------


@given(
    count=st.integers(0, 6),
    cuts=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=3),
    dtype=st.sampled_from(["i8", "f4", "f2", "?"]),
)
def test_a_view_is_what_numpy_makes_of_the_same_cuts(count: int, cuts: list[tuple[int, int]], dtype: str) -> None:
    array = rows(count, columns=6).astype(dtype)
    view, value = tensor(array)
    for start, stop in cuts:
        array, view = array[start:stop], view[start:stop]
    shapes = [array.shape, (array.shape[0], 2, 3), (array.size,)]
    for shape in [*shapes, (array.shape[0], -1, 1)] if array.size else shapes:
        expected, found = array.reshape(shape), view.reshape(shape)
        assert (found.shape, found.ndim, found.size, found.nbytes) == (
            expected.shape,
            expected.ndim,
            expected.size,
            expected.nbytes,
        )
        np.testing.assert_array_equal(found.host(), expected)
    assert value.copies == 1, "all views share one copy"


def test_a_view_of_another_number_of_elements_is_refused() -> None:
    view, _ = tensor(rows(2))
    with pytest.raises(ValueError, match="cannot have the shape"):
        view.reshape((3, WIDE))


def test_consecutive_rows_are_joined_where_they_are_and_everything_else_on_the_host() -> None:
    array = rows(8)
    whole, value = tensor(array)
    other, _ = tensor(array)
    joined = joined_on([whole[2:4], whole[4:5], whole[5:8]], MEMORY)
    assert isinstance(joined, DeviceTensor) and joined.address == whole.address + 2 * ALIGNMENT
    assert joined.shape == (6, WIDE) and value.copies == 0
    for parts in (
        [whole[0:2], whole[3:4]],  # a gap
        [whole[4:6], whole[2:4]],  # another order
        [whole[0:2], other[2:4]],  # two values
        [whole[0:2], array[2:4]],  # one of them on the host
        [array[0:2], whole[2:4]],
        [whole[0:0], whole[0:2]],  # begins with no rows at all
    ):
        found = joined_on(parts, MEMORY)
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, np.concatenate([on_host(part) for part in parts]))
    assert isinstance(joined_on([whole[0:1], whole[1:2]], ELSEWHERE), np.ndarray)


def test_what_the_device_cannot_take_as_it_is_is_copied() -> None:
    whole, value = tensor(rows(4, columns=WIDE + 1))
    assert usable_on(whole, MEMORY) is whole and usable_on(whole[:2], MEMORY).address == whole.address
    assert value.copies == 0
    for view, memory in ((whole[1:], MEMORY), (whole, ELSEWHERE), (whole, None), (whole[:0], MEMORY)):
        found = usable_on(view, memory)
        assert isinstance(found, np.ndarray) and np.array_equal(found, view.host())


def test_a_batch_for_a_session_without_a_device_is_made_of_arrays() -> None:
    whole, _ = tensor(rows(4))
    spec = model("m").inputs
    for parts in ([{"x": whole}], [{"x": whole[:1]}, {"x": whole[1:]}], [{"x": rows(1)}, {"x": whole}]):
        found = concatenate(parts, spec, batched=True)["x"]  # type: ignore[arg-type]
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, np.concatenate([on_host(part["x"]) for part in parts]))


# Sessions -----------------------------------------------------------------------------------------------------------


def test_an_output_stays_and_is_the_input_of_the_next_session(tmp_path: Path) -> None:
    first, second = opened(tmp_path, doubles()), opened(tmp_path, doubles())
    sent = rows(4)
    sent.flags.writeable = False  # as a view of a body is
    (kept,) = first.run_resident({"x": sent}, ["y"], {"y"})
    assert isinstance(kept, DeviceTensor) and kept.memory == MEMORY and kept.shape == (4, WIDE)
    (out,) = second.run_resident({"x": kept}, ["y"], ())  # type: ignore[dict-item]
    assert isinstance(out, np.ndarray) and np.array_equal(out, 4 * rows(4))
    (part,) = second.run_resident({"x": kept[1:3]}, ["y"], ())  # type: ignore[dict-item]
    assert np.array_equal(part, 4 * rows(4)[1:3])
    assert kept._held.copy is None, "nothing has gone to the host"
    first.close()
    assert np.array_equal(kept.host(), 2 * rows(4)), "it outlives its session"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (TensorProto.BOOL, "?"),
        (TensorProto.UINT8, "u1"),
        (TensorProto.INT8, "i1"),
        (TensorProto.UINT16, "u2"),
        (TensorProto.INT16, "i2"),
        (TensorProto.UINT32, "u4"),
        (TensorProto.INT32, "i4"),
        (TensorProto.UINT64, "u8"),
        (TensorProto.INT64, "i8"),
        (TensorProto.FLOAT16, "f2"),
        (TensorProto.FLOAT, "f4"),
        (TensorProto.DOUBLE, "f8"),
    ],
)
def test_every_datatype_of_numpy_can_stay(tmp_path: Path, kind: int, dtype: str) -> None:
    session = opened(tmp_path, same(kind))
    x = rows(2, columns=3).astype(dtype)
    (once,) = session.run_resident({"x": x}, ["y"], {"y"})
    (twice,) = session.run_resident({"x": once}, ["y"], {"y"})
    assert isinstance(twice, DeviceTensor) and twice.dtype == x.dtype
    assert np.array_equal(twice.host(), x) and twice.host().dtype == x.dtype


def test_tensors_that_numpy_does_not_have_go_over_the_host(tmp_path: Path) -> None:
    session = opened(tmp_path, models.echo())
    assert session.memory is None
    text = np.array([[b"hello"]], dtype=object)
    assert session.run({"text": text}, ["said"])[0].tolist() == [[b"hello"]]


def test_a_wrong_input_is_the_callers_fault_in_a_bound_run_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = opened(tmp_path, models.double())
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="invalid dimensions"):
            session.run_resident({"x": np.zeros((2, 3), np.float32)}, ["y"], {"y"})
    assert len(caplog.messages) == 1 and "is run again from host memory" in caplog.text


def test_a_model_that_fails_fails_in_a_bound_run_too(tmp_path: Path) -> None:
    session = opened(tmp_path, models.lookup())
    with pytest.raises((BackendFailed, InvalidRequest)):
        session.run_resident({"index": np.array([7])}, ["row"], {"row"})


def test_a_batch_whose_binding_fails_is_answered_from_the_host(tmp_path: Path) -> None:
    (kept,) = opened(tmp_path, doubles()).run_resident({"x": rows(2)}, ["y"], {"y"})
    (out,) = opened(tmp_path, doubles(), binds=False).run_resident({"x": kept}, ["y"], {"y"})
    assert isinstance(out, np.ndarray) and np.array_equal(out, 4 * rows(2))


# Ensembles ----------------------------------------------------------------------------------------------------------


def residents(flights: Flights, folder: Path) -> dict[str, Resident]:
    """Give every model of an ensemble a session with a device."""
    found = {name: opened(folder, doubles()) for name in flights.batchers}
    for name, session in found.items():
        flights.batchers[name].swap([session])
    return found


def test_a_tensor_between_two_steps_stays_on_the_device(tmp_path: Path) -> None:
    flights = Flights(ensemble(CHAIN, outputs=["out"]))
    sessions = residents(flights, tmp_path)
    sent = [rows(count, first) for count, first in ((1, 5), (3, 50), (2, 500))]
    numbers = [flights.call(len(each), inputs={"in": each}) for each in sent]
    flights.settle()
    (taken,) = sessions["b"].taken
    assert isinstance(taken["x"], DeviceTensor) and taken["x"].shape == (6, WIDE), "the whole batch goes on as it is"
    assert taken["x"]._held.copy is None
    for number, each in zip(numbers, sent, strict=True):
        (out,) = flights.answer(number).outputs
        assert isinstance(out, np.ndarray) and np.array_equal(out, 4 * each)
        assert not flights.answer(number).steps[0].answer.outputs, "the answer keeps no memory of the device"
    assert flights.at_rest()


def test_rows_that_are_not_taken_together_are_cut_or_copied(tmp_path: Path) -> None:
    flights = Flights(ensemble(CHAIN, outputs=["out"], max_batch_size=3), {"b": model("b", max_rows=3)})
    sessions = residents(flights, tmp_path)
    sent = [rows(1, 1000 * number) for number in range(6)]
    numbers = [flights.call(inputs={"in": each}) for each in sent]
    flights.settle()
    taken = [each["x"] for each in sessions["b"].taken]
    assert [each.shape[0] for each in taken] == [3, 3] and all(isinstance(each, DeviceTensor) for each in taken)
    assert taken[1].offset == 3 * ALIGNMENT
    assert all(np.array_equal(flights.answer(n).outputs[0], 4 * x) for n, x in zip(numbers, sent, strict=True))
    narrow = [rows(1, 1000 * number, columns=2) for number in range(6)]
    numbers = [flights.call(inputs={"in": each}) for each in narrow]
    flights.settle()
    taken = [each["x"] for each in sessions["b"].taken[2:]]
    assert isinstance(taken[0], DeviceTensor) and isinstance(taken[1], np.ndarray), "the device cannot begin there"
    assert all(np.array_equal(flights.answer(n).outputs[0], 4 * x) for n, x in zip(numbers, narrow, strict=True))


def test_a_tensor_that_somebody_else_needs_goes_to_the_host(tmp_path: Path) -> None:
    """`left` is an output of the ensemble; `t` is taken by b and by c, one of which is not on the device."""
    flights = Flights(ensemble(DIAMOND))
    sessions = residents(flights, tmp_path)
    flights.batchers["c"].swap([flights.sessions["c"]])
    number = flights.call(2, inputs={"in": rows(2)})
    flights.settle()
    left, out = flights.answer(number).outputs
    assert np.array_equal(left, 4 * rows(2)) and np.array_equal(out, 8 * rows(2))
    assert [sessions[name].kept for name in "ab"] == [[frozenset()], [frozenset()]]


def test_a_caller_in_the_same_batch_gets_arrays(tmp_path: Path) -> None:
    flights = Flights(ensemble(CHAIN, outputs=["out"]))
    sessions = residents(flights, tmp_path)
    number = flights.call(inputs={"in": rows(1)})
    replies: list[Any] = []
    now = flights.clock.now()
    direct = Call(
        inputs={"x": rows(1, 7)},
        rows=1,
        signature=(("x", (WIDE,)),),
        arrived_s=now,
        deadline=now + 60,
        reply=replies.append,
    )
    flights.batchers["a"].submit(direct)
    flights.settle()
    assert sessions["a"].kept == [frozenset()], "they shared a batch"
    assert np.array_equal(replies[0].outputs[0], 2 * rows(1, 7))
    assert np.array_equal(flights.answer(number).outputs[0], 4 * rows(1))


def test_a_tensor_for_a_session_that_was_swapped_meanwhile_is_copied(tmp_path: Path) -> None:
    flights = Flights(ensemble(CHAIN, outputs=["out"]))
    sessions = residents(flights, tmp_path)
    plain = flights.sessions["b"]
    run = sessions["a"].run_resident

    def swap_then_run(*given: Any) -> Any:
        flights.batchers["b"].swap([plain])
        return run(*given)

    sessions["a"].run_resident = swap_then_run  # type: ignore[method-assign]
    number = flights.call(2, inputs={"in": rows(2)})
    flights.settle()
    assert sessions["a"].kept == [frozenset({"y"})] and plain.batches == [2]
    assert np.array_equal(flights.answer(number).outputs[0], 4 * rows(2))


def test_instances_on_different_devices_keep_nothing(tmp_path: Path) -> None:
    flights = Flights(ensemble(CHAIN, outputs=["out"]))
    sessions = residents(flights, tmp_path)
    sessions["b"].memory = ELSEWHERE
    flights.batchers["b"].swap([sessions["b"]])
    assert flights.batchers["b"].resident == ELSEWHERE
    flights.call(inputs={"in": rows(1)})
    flights.step()
    assert sessions["a"].kept == [frozenset()]


def test_sampled_rows_come_to_the_host(tmp_path: Path) -> None:
    flights = Flights(ensemble(CHAIN, outputs=["out"]))
    sessions = residents(flights, tmp_path)
    sampled: list[Any] = []
    statistics = flights.batchers["a"].statistics
    spec = flights.batchers["a"].spec
    statistics.offer = VersionQuality(spec, None, lambda _, row: not sampled.append(row)).offer
    statistics.sample_at = 1
    flights.call(2, inputs={"in": rows(2)})
    flights.settle()
    assert isinstance(sessions["b"].taken[0]["x"], DeviceTensor)
    ((name, values, _),) = sampled[0]
    assert name == "y" and np.array_equal(values, 2 * rows(1)[0])
