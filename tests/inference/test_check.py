"""The process that tries model files first: it may die, the server does not."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oriel_inference.errors import LoadFailed
from oriel_inference.model import EngineOptions
from oriel_inference.repository.check import CheckPool
from oriel_inference.repository.check_child import NICENESS
from oriel_wire.process.helper import Helper

from ..waiting import wait_until
from . import models

OPTIONS = EngineOptions()


def stands(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def put(root: Path, model: object) -> Path:
    return models.put(root, "m", model) / "1/model.onnx"


def test_one_process_is_reused_and_ends(tmp_path: Path) -> None:
    path, check = put(tmp_path, models.double()), CheckPool(120)
    assert check.pids == []
    check.check(path, "m", "onnxruntime", OPTIONS)
    (pid,) = check.pids
    check.check(path, "m", "onnxruntime", OPTIONS)
    assert check.pids == [pid]
    path.write_bytes(b"junk")
    with pytest.raises(LoadFailed, match="not a whole ONNX file"):
        check.check(path, "m", "onnxruntime", OPTIONS)
    assert check.pids == [] and not stands(pid)


def test_a_crash_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold_children: None) -> None:
    path, check = put(tmp_path, models.double()), CheckPool(60)
    check.check(path, "m", "onnxruntime", OPTIONS)
    (pid,) = check.pids
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)  # a crash would overtake a stop that has not taken effect
    os.kill(pid, signal.SIGSEGV)  # takes effect when it goes on
    write = Helper._write

    def doomed(helper: Helper, *given: Any) -> None:
        write(helper, *given)
        os.kill(pid, signal.SIGCONT)

    with monkeypatch.context() as patch, pytest.raises(LoadFailed, match=r"crashes the runtime .* ended with -11\)"):
        patch.setattr(Helper, "_write", doomed)
        check.check(path, "m", "onnxruntime", OPTIONS)
    check.check(path, "m", "onnxruntime", OPTIONS)
    assert len(check.pids) == 1 and check.pids != [pid]
    check.close_idle()
    assert check.pids == []


@pytest.mark.parametrize("answer", [None, ["", True, 1], {"reason": ""}, [1, True], ["", "yes"]])
def test_an_answer_of_another_form_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """The author of a model file may have taken over the process that tries it."""
    path, check = put(tmp_path, models.double()), CheckPool(60)
    monkeypatch.setattr(Helper, "ask", lambda *_, **__: (answer, []))
    with pytest.raises(LoadFailed, match=r"crashes the runtime .* gave an answer that cannot be read\)"):
        check.check(path, "m", "onnxruntime", OPTIONS)
    assert check.pids == []


def test_a_child_that_is_slow_to_end_holds_up_no_other_check_and_no_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits for a disk or a GPU in the kernel ends only when that answers."""
    path, check = put(tmp_path, models.double()), CheckPool(60)
    locked = []
    monkeypatch.setattr(Helper, "ask", lambda *_, **__: (("bad", False), []))
    monkeypatch.setattr(Helper, "stop", lambda _: locked.append(check._lock.locked()))
    with pytest.raises(LoadFailed, match="bad"):
        check.check(path, "m", "onnxruntime", OPTIONS)
    assert locked == [False]


def test_a_hang_is_a_reason(tmp_path: Path) -> None:
    path, check = put(tmp_path, models.endless()), CheckPool(0.05)
    with pytest.raises(LoadFailed, match=r"could not be opened within 0.05 s"):
        check.check(path, "m", "onnxruntime", OPTIONS)
    assert check.pids == []


def test_a_check_is_given_up_when_its_files_are_not_wanted_any_more(tmp_path: Path) -> None:
    """It went on for a minute after its folder had been taken away."""
    path, check = put(tmp_path, models.endless()), CheckPool(600)
    looks = iter([True, False, False])
    with pytest.raises(LoadFailed, match="m was changed or removed while it was being checked"):
        check.check(path, "m", "onnxruntime", OPTIONS, lambda: next(looks))
    assert check.pids == []


def test_checks_leave_the_cores_to_what_serves(tmp_path: Path) -> None:
    path, check = put(tmp_path, models.double()), CheckPool(120)
    check.check(path, "m", "onnxruntime", OPTIONS)
    (pid,) = check.pids
    lower = min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    assert os.getpriority(os.PRIO_PROCESS, pid) == lower
    check.close_idle()


def test_a_pool_has_a_child_per_check_at_once_and_ends_them(tmp_path: Path) -> None:
    fine, hangs = put(tmp_path / "a", models.double()), put(tmp_path / "b", models.endless())
    pool, reasons = CheckPool(240), []

    def hang() -> None:
        with pytest.raises(LoadFailed) as failure:
            pool.check(hangs, "b", "onnxruntime", OPTIONS)
        reasons.append(failure.value.reason)

    thread = threading.Thread(target=hang)
    thread.start()
    wait_until(lambda: pool._busy)
    (stuck,) = pool._busy
    assert pool.check(fine, "a", "onnxruntime", OPTIONS) is True
    idle = pool.pids
    assert pool.check(fine, "a", "onnxruntime", OPTIONS) is True
    assert pool.pids == idle and idle != [stuck.pid]
    pool.close_idle()
    assert pool.pids == [] and stuck.pid is not None
    pool.close()
    thread.join()
    assert reasons and stuck.pid is None
    with pytest.raises(LoadFailed, match="shutting down"):
        pool.check(fine, "a", "onnxruntime", OPTIONS)
    pool.close_idle()


def test_what_needs_too_much_memory_is_not_tried_in_the_server(tmp_path: Path) -> None:
    # Some bytes that ask for terabytes: the sizes are inputs, so nothing is computed while it is opened.
    nodes = [
        models.helper.make_node("Add", ["x", "many"], ["shape"]),
        models.helper.make_node("ConstantOfShape", ["shape"], ["y"]),
    ]
    many = models.numpy_helper.from_array(models.np.array([1 << 20, 1 << 20]), "many")
    model = models.graph(nodes, [("x", models.INT64, [2])], [("y", models.FLOAT, ["a", "b"])], [many])
    check = CheckPool(120)
    assert check.check(put(tmp_path, model), "m", "onnxruntime", OPTIONS) is False
    assert check.pids == []
    assert check.check(put(tmp_path, models.double()), "m", "onnxruntime", OPTIONS) is True
    check.close_idle()


def test_engines_are_not_built_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TensorRT build takes minutes: in the process that tries models it would exceed the time limit, and be repeated
    later.
    """
    asked: list[dict[str, Any]] = []

    def ask(self: Helper, request: dict[str, Any], **_: object) -> tuple[Any, list[bytes]]:
        asked.append(request)
        return ("", True), []

    monkeypatch.setattr(Helper, "ask", ask)
    providers = (("TensorrtExecutionProvider", {"device_id": "0"}), ("CUDAExecutionProvider", {"device_id": "0"}))
    path = put(tmp_path, models.double())
    assert CheckPool(120).check(path, "m", "onnxruntime", EngineOptions(providers=providers))
    assert asked[0]["options"]["providers"] == [("CUDAExecutionProvider", {"device_id": "0"})]
    assert asked[0]["memory_bytes"] == 0  # CUDA maps more than an address space limit would allow


def test_a_check_that_a_stop_ends_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, check = put(tmp_path, models.double()), CheckPool(60)
    monkeypatch.setattr(Helper, "_wait_for_answer", lambda *_: check.close())
    with pytest.raises(LoadFailed, match="the server is shutting down"):
        check.check(path, "m", "onnxruntime", OPTIONS)


def test_a_first_state_has_the_shape_that_the_configuration_gives(tmp_path: Path) -> None:
    """A state of a variable size was tried with one element, which not every model takes."""
    weight = models.numpy_helper.from_array(np.ones((3, 1), np.float32), "w")
    nodes = [
        models.helper.make_node("MatMul", ["state", "w"], ["sum"]),
        models.helper.make_node("Add", ["x", "sum"], ["y"]),
    ]
    inputs = [("x", models.FLOAT, ["n", 1]), ("state", models.FLOAT, ["n", "m"])]
    path = put(tmp_path, models.graph(nodes, inputs, [("y", models.FLOAT, ["n", 1])], [weight]))
    check = CheckPool(60)
    assert not check.check(path, "m", "onnxruntime", OPTIONS)
    assert check.check(path, "m", "onnxruntime", OPTIONS, shapes={"state": (1, 3)})
    check.close()
