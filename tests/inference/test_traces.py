"""The trace extension: its settings over both protocols, and the files of traces."""

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from oriel_inference.batching.call import BatchTimes
from oriel_inference.catalog import Catalog
from oriel_inference.errors import InferenceError, InvalidRequest, NotSupported
from oriel_inference.servers import traces as module
from oriel_inference.servers.meter import Meter
from oriel_inference.servers.spans import Ended, Requested, Run, Step
from oriel_inference.servers.traces import TraceSettings, TraceWriter
from oriel_inference.trace_config import DEFAULTS, TraceStart, read_setting
from oriel_wire.observe.trace import new_trace

from . import models
from .bench import context
from .conftest import settings_of
from .thread_unit import unit_in_thread

ON = DEFAULTS | {"trace_level": ("TIMESTAMPS",), "trace_rate": 1}
STAGES = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]


def opened(path: Path | str, **values: Any) -> tuple[TraceSettings, Meter]:
    catalog = Catalog()
    catalog.is_ready = lambda name: name in ("a", "b")  # type: ignore[method-assign]
    meter = Meter(catalog)
    return TraceSettings(TraceStart(file=str(path), values=ON | values), catalog, meter), meter


def ended(model: str = "a", *, run: Run | None = None, protocol: str = "http") -> Ended:
    found = Ended(context("t"), Requested(protocol, "POST"), new_trace(False), 0, 1.0, 9.0)
    found.model, found.version, found.queued_s, found.run = model, "3", 2.0, run
    return found


def ran(started_s: float = 3.0, *steps: Step, executions: int = 1) -> Run:
    times = BatchTimes(started_s, started_s + 1, started_s + 2, started_s + 3, 1, steps=executions)
    return Run(times, 0, steps)


def written(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


# Settings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "texts", "sentence"),
    [
        ("trace_rate", ["abc"], "Unable to parse 'trace_rate', got: abc"),
        ("trace_rate", [""], "Unable to parse 'trace_rate', got: "),
        ("trace_rate", ["4294967296"], "value is out of range [ 0, 4294967295 ], got: 4294967296"),
        ("trace_count", ["-2"], "value is out of range [ -1, 2147483647 ], got: -2"),
        ("log_frequency", ["1", "2"], "expect only 1 value for 'log_frequency'"),
        ("trace_level", ["OFF", "TIMESTAMPS"], "Expect only one trace level 'OFF' is specified"),
        ("trace_level", ["NOPE"], "'NOPE' is none of OFF, TIMESTAMPS, TENSORS"),
    ],
)
def test_wrong_values_are_refused_with_tritons_sentences(name: str, texts: list[str], sentence: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_setting(name, texts)
    assert sentence in refused.value.message


def test_a_model_follows_the_settings_for_all_but_for_its_own(tmp_path: Path) -> None:
    settings, _ = opened(tmp_path / "t")
    settings.change("a", {"trace_rate": ["12"]})
    settings.change("", {"trace_rate": ["56"], "log_frequency": ["7"], "unknown": ["1"]})
    assert [settings.shown(each)["trace_rate"] for each in ("", "a", "b")] == [["56"], ["12"], ["56"]]
    assert settings.shown("a")["log_frequency"] == ["7"]
    settings.change("a", {"trace_rate": []})
    settings.change("", {"trace_rate": [], "log_frequency": []})
    assert settings.shown("a") == settings.shown("") == settings.shown("b")
    assert settings.shown("a")["trace_rate"] == ["1"] and list(settings._given) == [""]


@pytest.mark.parametrize(
    ("model", "given", "error", "sentence"),
    [
        ("", {"trace_file": ["/etc/x"]}, NotSupported, "trace file location can not be updated through network"),
        ("", {"trace_file": []}, NotSupported, "trace file location"),
        ("c", {}, InvalidRequest, "Request for unknown model : c"),
        ("", {"trace_rate": ["0"]}, InvalidRequest, "invalid trace setting :sample rate must be non-zero"),
        ("", {"trace_count": ["5"], "trace_rate": ["x"]}, InvalidRequest, "Unable to parse"),
    ],
)
def test_a_refused_change_changes_nothing(
    tmp_path: Path, model: str, given: Mapping[str, list[str]], error: type[InferenceError], sentence: str
) -> None:
    settings, _ = opened(tmp_path / "t")
    before = settings.shown("")
    with pytest.raises(error) as refused:
        settings.change(model, given)
    assert sentence in refused.value.message and settings.shown("") == before and not (tmp_path / "t").exists()


def test_without_a_file_nothing_can_be_traced() -> None:
    settings, meter = opened("", trace_level=())
    with pytest.raises(InvalidRequest, match="trace file name is not given"):
        settings.change("", {"trace_level": ["TIMESTAMPS"]})
    assert meter.traces is None


def test_requests_are_only_looked_at_while_something_is_traced(tmp_path: Path) -> None:
    settings, meter = opened(tmp_path / "t", trace_level=())
    assert meter.traces is None
    settings.change("a", {"trace_level": ["TIMESTAMPS"]})
    assert meter.traces is not None
    meter.traces(ended("b"))
    refused = ended("a")
    refused.queued_s = 0.0
    meter.traces(refused)
    settings.change("a", {"trace_level": []})
    settings.close()
    assert meter.traces is None and not (tmp_path / "t").exists()


def test_values_of_tensors_are_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings, _ = opened(tmp_path / "t")
    with caplog.at_level(logging.WARNING):
        settings.change("", {"trace_level": ["TIMESTAMPS", "TENSORS"]})
    assert "TENSORS has no effect" in caplog.text
    assert settings.shown("")["trace_level"] == ["TIMESTAMPS", "TENSORS"], "clients compare it"


def test_rate_and_count_choose_the_requests(tmp_path: Path) -> None:
    settings, _ = opened(tmp_path / "t", trace_rate=3, trace_count=2)
    for _ in range(5):
        settings.note(ended())
    assert settings.shown("")["trace_count"] == ["1"]
    settings.change("", {"trace_count": ["2"]})
    for _ in range(3):
        settings.note(ended())
    settings.change("", {"log_frequency": ["0"]})
    assert settings.shown("")["trace_count"] == ["1"], "what is left of it"
    for _ in range(30):
        settings.note(ended())
    settings.close()
    assert [each["id"] for each in written(tmp_path / "t") if "model_name" in each] == [1, 2, 3]


def test_reading_the_settings_over_grpc_changes_nothing(tmp_path: Path) -> None:
    settings, _ = opened(tmp_path / "t", trace_rate=2, trace_count=2)
    for number in range(8):
        settings.note(ended())
        settings.change("a" if number % 2 else "", {})
    settings.change("", {"log_frequency": ["0"]})
    settings.note(ended())
    settings.note(ended())
    settings.close()
    assert settings.shown("")["trace_count"] == ["0"] and len(written(tmp_path / "t")) == 4


# Files --------------------------------------------------------------------------------------------------------------


def test_a_request_is_written_as_tritons_tools_read_it(tmp_path: Path) -> None:
    inner = Step("b", "1", 3.0, ran(3.5))
    settings, _ = opened(tmp_path / "t")
    for each in (ended(run=ran()), ended(run=ran(3.0, inner), protocol="grpc"), ended(run=ran(executions=0)), ended()):
        settings.note(each)
    settings.close()
    found = written(tmp_path / "t")
    heads = [each for each in found if "model_name" in each]
    assert heads[0] == {"id": 1, "model_name": "a", "model_version": 3, "request_id": "r"}
    assert heads[2] == {"id": 3, "model_name": "b", "model_version": 1, "parent_id": 2}
    stamps = [{one["name"]: one["ns"] for one in each["timestamps"]} for each in found if "timestamps" in each]
    assert list(stamps[0])[:4] == ["HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "QUEUE_START"]
    assert [stamps[0][each] for each in STAGES] == [3_000_000_000 + n * 1_000_000_000 for n in range(4)]
    assert list(stamps[0])[8:] == ["INFER_RESPONSE_COMPLETE", "REQUEST_END", "HTTP_SEND_START", "HTTP_SEND_END"]
    assert stamps[1]["GRPC_WAITREAD_START"] == 1_000_000_000 and "COMPUTE_START" not in stamps[1], "an ensemble"
    assert list(stamps[2]) == ["REQUEST_START", "QUEUE_START", *STAGES, "REQUEST_END"]
    assert not set(STAGES) & (set(stamps[3]) | set(stamps[4])), "from the response cache, and refused in the queue"
    for times in stamps:
        assert list(times.values()) == sorted(times.values())


def test_every_so_many_traces_make_a_numbered_file(tmp_path: Path) -> None:
    settings, _ = opened(tmp_path / "t", log_frequency=2)
    for _ in range(5):
        settings.note(ended())
    settings.close()
    assert [len(written(tmp_path / f"t.{n}")) for n in range(3)] == [4, 4, 2] and not (tmp_path / "t").exists()


def test_a_file_that_no_request_fills_does_not_keep_others_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED", 8)
    settings, _ = opened(tmp_path / "t", log_frequency=8)
    for each in ["8"] * 7 + ["2"] * 2:
        settings.change("", {"log_frequency": [each]})
        settings.note(ended())
    settings._writer._thread.submit(int).result()
    settings.note(ended())
    settings.close()
    assert [len(written(tmp_path / f"t.{n}")) for n in range(3)] == [14, 2, 2], "the ninth is lost"


def test_the_file_is_complete_after_each_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITTEN_AT_ONCE", 1)
    writer = TraceWriter(str(tmp_path / "t"))
    for number in range(3):
        writer.put(ended(), 0)
        writer._thread.submit(int).result()
        assert len(written(tmp_path / "t")) == 2 * number + 2
    writer.close()


def test_the_number_of_files_is_bounded(tmp_path: Path) -> None:
    settings, _ = opened(tmp_path / "t", log_frequency=1)
    settings._writer._left_bytes = 3 * module.MIN_FILE_BYTES
    for _ in range(5):
        settings.note(ended())
    settings.close()
    assert len(list(tmp_path.iterdir())) == 3


def test_traces_beyond_the_bound_of_the_queue_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED", 4)
    writer, free = TraceWriter(str(tmp_path / "t")), Event()
    writer._thread.submit(free.wait)
    for _ in range(9):
        writer.put(ended(), 0)
    free.set()
    writer.close()
    assert len(written(tmp_path / "t")) == 2 * 4


@pytest.mark.parametrize(("path", "why"), [("no/t", "No such file"), ("/dev/full", "No space left")])
def test_a_file_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str, why: str
) -> None:
    settings, _ = opened(tmp_path / path, log_frequency=0 if why.endswith("left") else 1)
    for _ in range(3):
        settings.note(ended())
    settings.close()
    assert [each.levelname for each in caplog.records] == ["WARNING"] and why in caplog.text


# Whole paths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
async def test_clients_change_the_settings_and_find_their_traces(kind: ModuleType, tmp_path: Path) -> None:
    models.put(tmp_path / "m", "double", models.double(), models.DOUBLE)
    settings = replace(settings_of(tmp_path / "m"), traces=TraceStart(file=str(tmp_path / "t")))
    over_http = kind is tritonclient.http

    def values(found: Any) -> dict[str, Any]:
        if over_http:
            return dict(found)
        return {name: list(each.value) for name, each in found.settings.items()}

    def use() -> None:
        with unit_in_thread(settings) as unit:
            client = kind.InferenceServerClient(f"127.0.0.1:{unit.http_port if over_http else unit.grpc_port}")
            one = "1" if over_http else ["1"]
            shown = values(client.get_trace_settings("double"))
            assert shown["trace_level"] == ["OFF"] and shown["trace_rate"] == ("1000" if over_http else ["1000"])
            asked = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
            changed = values(client.update_trace_settings("double", asked))
            assert changed["trace_rate"] == one and values(client.get_trace_settings())["trace_level"] == ["OFF"]
            given = kind.InferInput("x", [1, 4], "FP32")
            given.set_data_from_numpy(np.zeros((1, 4), np.float32))
            for _ in range(3):
                client.infer("double", [given])
            cleared = values(client.update_trace_settings("double", {"trace_level": None, "trace_rate": None}))
            assert cleared == values(client.get_trace_settings())
            client.infer("double", [given])
            for wrong, sentence in (({"trace_rate": "x"}, "Unable to parse"), ({"trace_file": "f"}, "can not be")):
                with pytest.raises(InferenceServerException, match=sentence):
                    client.update_trace_settings("double", wrong)
            with pytest.raises(InferenceServerException, match="Request for unknown model : nobody"):
                client.get_trace_settings("nobody")
            client.close()
        heads = [each for each in written(tmp_path / "t") if "model_name" in each]
        assert [each["model_name"] for each in heads] == ["double"] * 3

    await asyncio.to_thread(use)
