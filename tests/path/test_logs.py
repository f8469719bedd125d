"""JSON logs: every line that the units of a real stack write fits the table of docs/logs.md."""

import json
import logging
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from stacks import command, key, started

from oriel_wire.observe.line_log import LineLog
from oriel_wire.process import logs

ROOT = Path(__file__).resolve().parents[2]
EVIL = "a\\nb \\x1b[31m \\u202e \\udc80 \\x7f"
SERVICE = f"""
import os
from oriel_logic import service
@service
%s
    print("{EVIL}")
    os.write(2, b"as a library does\\nunfinished")
    raise ValueError("{EVIL}" * %d)
"""
MODEL = f"""
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        pb_utils.Logger.log_error("{EVIL}")
        print("{EVIL}", flush=True)
        raise ValueError("{EVIL}")
"""
TENSOR = '{ name: "x" data_type: TYPE_FP32 dims: [ 1 ] }'
CONFIG = f'backend: "python" max_batch_size: 1 input {TENSOR} output {TENSOR}'


def schema() -> dict[str, tuple[str, bool]]:
    """Return the type of each field in the table, and whether every record has it."""
    found = {}
    for row in (ROOT / "docs/logs.md").read_text().splitlines():
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        if len(cells) == 3 and cells[1] in ("string", "number"):
            needed = not cells[2].startswith("optional") and "not in access logs" not in cells[2]
            found |= {name.strip("` "): (cells[1], needed) for name in cells[0].split(",")}
    return found


def check(line: str) -> dict[str, Any]:
    """Return the record of a line after checking it."""
    assert line.isascii() and line.isprintable() and len(line) < 16384, line
    record: dict[str, Any] = json.loads(line)
    fields = schema()
    assert {name for name, (_, needed) in fields.items() if needed} <= record.keys(), record
    if "logger" in record:
        assert record.keys() <= fields.keys(), record
    for name in record.keys() & fields.keys():
        assert isinstance(record[name], str if fields[name][0] == "string" else (int, float)), record
    assert datetime.fromisoformat(record["time"]).utcoffset() is not None
    return record


def test_every_line_of_every_unit_is_a_record_of_the_documented_schema(tmp_path: Path) -> None:
    model, services = tmp_path / "models/loud", tmp_path / "services"
    (model / "1").mkdir(parents=True)
    services.mkdir()
    (model / "1/model.py").write_text(MODEL)
    (model / "config.pbtxt").write_text(CONFIG)
    (services / "loop.py").write_text(SERVICE % ("async def loop(request, models, ctx):", 5000))
    (services / "worked.py").write_text(SERVICE % ("def worked(request):", 1))
    words = ["--services", str(services), "--model-repository", str(model.parent), "--log-format", "json"]
    with (tmp_path / "log").open("w+") as log:
        with started(tmp_path / "state", words, {"ORIEL_LOG_LEVEL": "INFO"}, log) as stack:
            base, gold = stack.base, {**key("gold"), "x-request-id": "mine"}
            body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
            for path in ("v2/models/loud/infer", "v1/services/loop", "v1/services/worked"):
                assert httpx.post(f"{base}/{path}", json=body, headers=gold, timeout=60).status_code >= 500
        log.seek(0)
        records = [check(line.rstrip("\n")) for line in log]
    assert {each["unit"] for each in records} == {"up", "gateway", "logic", "inference"}
    printed = {(each["unit"], each.get("printed")) for each in records}
    assert printed >= {("logic", "stdout"), ("logic", "stderr"), ("logic", "worker"), ("inference", "model")}
    of_requests = {each["target"]: each for each in records if each.get("request_id") == "mine"}
    assert of_requests["loop"]["tenant"] == "acme" and of_requests["loop"]["reason"] == "handler_failed"
    assert of_requests["loop"]["traceback"].startswith(" [cut] ")
    assert "ValueError" in of_requests["worked"]["traceback"] and len(of_requests) == 2
    assert any("ValueError" in each.get("traceback", "") for each in records if each["unit"] == "inference")


def test_refusals_and_crashes_before_a_unit_runs_are_records() -> None:
    for words, level in ((["--policies", "/nowhere"], "CRITICAL"), (["--bogus"], "WARNING")):
        line = command("gateway", "--log-format=json", *words)
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert check(done.stderr.removesuffix("\n"))["level"] == level


def test_a_process_goes_on_when_nobody_reads_its_log_any_more() -> None:
    words = "import logging, sys; from oriel_wire.process.logs import capture; capture('gateway');"
    words += "sys.stdin.readline(); [(print('a line'), logging.error('one')) for _ in range(200)]"
    line = [sys.executable, "-c", words]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None and process.stdin is not None
        process.stderr.close()
        process.stdin.write(b"\n")
        process.stdin.flush()
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_a_record_that_cannot_be_formatted_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    logs._BoundedHandler(sys.stderr).handle(logging.LogRecord("n", logging.INFO, "a.py", 7, "two %s %s", (1,), None))
    assert capsys.readouterr().err.startswith("a record of a.py:7 cannot be formatted: TypeError(")


def test_lines_of_an_access_log_have_the_common_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_identity", {"unit": "gateway", "instance": "gateway-0", "pid": 1})
    log = LineLog[dict[str, Any]](str(tmp_path / "log"), lambda note, offset_s: note)
    log.put({"time": logs.timestamp(0.0), "status": 200, "route": "r"})
    log.close()
    assert check((tmp_path / "log").read_text().strip())["message"] == "request"


def test_a_flood_of_one_kind_is_cut_to_a_share_per_second_and_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(logs.threading, "Timer", lambda seconds, report: SimpleNamespace(start=lambda: None))
    handler = logs._BoundedHandler(sys.stderr)
    for second in (1.0, 2.0):
        clock[0] = second
        for number in range(100):
            handler.emit(logging.LogRecord("n", logging.ERROR, "a.py", 1, "tenant %s", (str(number),), None))
        handler.emit(logging.LogRecord("n", logging.ERROR, "a.py", 2, "another kind", (), None))
    handler.report()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 * (logs.MAX_SAME + 1) + 1
    assert lines[-1] == "160 more like this were left out: tenant %s" and lines.count("another kind") == 2
    for number in range(10 * logs.MAX_KINDS):
        handler.emit(logging.LogRecord("n", logging.ERROR, "b.py", number, f"made up {number}", (), None))
    assert len(capsys.readouterr().err.splitlines()) < logs.MAX_KINDS + logs.MAX_SAME + 1
