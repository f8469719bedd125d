"""`oriel tune` from beginning to end, with a tiny model on a server of its own, and what it refuses."""

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from oriel_cli.main import main
from oriel_policies.metering.prices import NANO, Price
from oriel_tools.tune.machine import Machine, serving
from oriel_tools.tune.objective import Reached, parse
from oriel_tools.tune.options import Options
from oriel_tools.tune.report import costs
from oriel_tools.tune.setting import Setting, Subject, changed
from oriel_tools.tune.turns import Measured
from oriel_wire.errors import StartFailed
from oriel_wire.v2.metadata import parse_config_text

from ..inference.control_server import put
from ..inference.models import DOUBLE

# A delay that alone is longer than the objective allows.
CONFIG = f"""# keep this line{DOUBLE}dynamic_batching {{
  max_queue_delay_microseconds: 400000  # far too long
}}
"""
GOAL = ["--objective", "p90 <= 200 ms for gold at 20/s"]
PRICES = '[prices.cloud]\nclass = "c7i"\ncurrency = "USD"\nvalid_from = 2026-01-01\ndevice_hour = 0.36\n'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    put(tmp_path / "models", 2.0, config=CONFIG)
    return tmp_path / "models"


def test_a_model_is_tuned_and_the_patch_makes_it_reach_its_objective(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the load may be quoted depends on the machine, and with it the exit code; the choice does not."""
    (tmp_path / "prices.toml").write_text(PRICES)
    patch = tmp_path / "tuned.patch"
    flags = ["--repository", str(repository), *GOAL, "--budget", "5s", "--cores", "1", "--max-replicas", "1", "--json"]
    code = main(["tune", "double", *flags, "--patch", str(patch), "--prices", str(tmp_path / "prices.toml")])
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert code == (0 if found["met"] else 1) and "rows per second" in err and "calls in time" in err
    assert found["objectives"] == ["p90 <= 200 ms for gold at 20/s"]
    assert found["present"]["setting"]["max_queue_delay_microseconds"] == 400_000
    assert not found["present"]["simulated"][0]["met"] and not found["present"]["measured"][0]["met"]
    assert found["chosen"]["setting"]["max_queue_delay_microseconds"] < 200_000
    assert found["chosen"]["simulated"][0]["met"] and found["chosen"]["measured"][0]["calls"] > 0
    (change,) = found["changes"]
    assert list(change["fields"]) == ["max_queue_delay_microseconds"] and change["worth"].startswith("p90 of gold ")
    assert found["limit"]["text"] and found["reaches"]["part"] > 1.0
    assert [each["rate_per_s"] for each in found["promises"]] == [10.0, 15.0, 20.0, 25.0, 30.0]
    for each in found["promises"]:
        (target,) = each["targets"]
        assert (target["tier"], target["percent"]) == ("gold", 90.0)
        cost = {"cloud": pytest.approx(0.36 / 3600.0 / each["rate_per_s"] * 1e6)}
        assert each["cost"] == (cost if target["target_ms"] is not None else {})
    assert 0.0 < found["promises"][0]["targets"][0]["target_ms"] < 200.0, "with half of the load"
    (cost,) = found["cost"]
    assert (cost["device_class"], cost["price"], cost["per_hour"]) == ("c7i", "cloud", 0.36)

    file = repository / "double/config.pbtxt"
    assert file.read_text() == CONFIG, "the repository is only read"
    assert patch.read_text() == found["patch"]
    if found["confirmed"]:
        done = subprocess.run(
            ["git", "apply", "-p1"], input=found["patch"].encode(), cwd=repository, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        after = parse_config_text(file.read_text())
        wanted = found["chosen"]["setting"]["max_queue_delay_microseconds"]
        assert after.dynamic_batching.max_queue_delay_microseconds == wanted
        after.dynamic_batching.max_queue_delay_microseconds = 400_000
        assert after == parse_config_text(CONFIG) and file.read_text().startswith("# keep this line\n")


async def test_a_variant_is_loaded_when_it_serves_and_one_that_computes_something_else_says_why(
    repository: Path, tmp_path: Path
) -> None:
    for name, factor in (("int8", 2.0), ("fp16", 9.0)):
        put(tmp_path / "other", factor)
        shutil.copyfile(tmp_path / "other/double/1/model.onnx", repository / f"double/1/model.{name}.onnx")
    flags = ("--artefact-folder", str(tmp_path / "artefacts"))
    async with serving(repository, "double", cores=1, flags=flags) as machine:
        model = Subject(model="double", text=CONFIG, completed=await machine.completed(), cores=1)
        assert await machine.load(changed(model, replace(model.present, variant="int8"))) == ""
        why = await machine.load(changed(model, replace(model.present, variant="fp16")))
        assert why.startswith("refused: ") and "differs" in why
        assert await machine.load(CONFIG) == "", "the model itself waits for nothing"
    assert (repository / "double/config.pbtxt").read_text() == CONFIG


async def test_an_artefact_that_is_still_built_when_the_time_is_over_is_not_waited_for() -> None:
    class Building(Machine):
        async def _request(self, method: str, target: str, body: bytes = b"", *, port: int = 0) -> bytes:
            return json.dumps([{"name": "m", "artefact": {"state": "building", "reason": ""}}]).encode()

    why = await Building(1, 2, "m").load("", within_s=0.0)
    assert why == "it was not ready after 0 s: build it beforehand with 'oriel engines build'"


@pytest.mark.parametrize(
    ("package", "providers", "compilers"),
    [
        (SimpleNamespace(__file__="", get_version=lambda: "2026.3.0"), [], ["openvino"]),
        (SimpleNamespace(__file__="", get_version=lambda: "2026.3.0"), ["OpenVINOExecutionProvider"], []),
        (None, [], []),
    ],
)
def test_openvino_is_tried_once_in_the_way_in_which_it_is_installed(
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: object,
    providers: list[str],
    compilers: list[str],
) -> None:
    found: list[Options] = []

    async def stopped(options: Options, say: object) -> None:
        found.append(options)
        raise StartFailed("enough")

    monkeypatch.setitem(sys.modules, "openvino", package)
    monkeypatch.setattr("oriel_tools.tune.command._providers", lambda: providers)
    monkeypatch.setattr("oriel_tools.tune.command.tuned", stopped)
    assert main(["tune", "double", "--repository", str(repository), *GOAL]) == 2
    assert found[0].providers == providers and found[0].compilers == compilers


def test_ctrl_c_ends_a_search_that_does_not_wait_and_the_server_with_it(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    urls: list[str] = []

    async def searching(options: Options, say: object) -> None:
        async with serving(options.repository, options.model, cores=1) as machine:
            urls.append(machine.url)
            events.append((await machine.completed()).name)
            signal.raise_signal(signal.SIGINT)
            events.append("went on")

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("oriel_tools.tune.command.tuned", searching)
    assert main(["tune", "double", "--repository", str(repository), *GOAL]) == 130
    assert events == ["double"] and signal.getsignal(signal.SIGINT) is before
    with pytest.raises(URLError, match="refused"):
        urlopen(f"{urls[0]}/v2/health/live")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nobody"], "has no model 'nobody'"),
        (["../models/double"], "has no model"),
        (["double", "--replicas", "9"], "--max-replicas must be at least --replicas"),
        (["double", "--patch", "/absent/x.patch"], "/absent/x.patch: there is no such folder"),
    ],
)
def test_what_cannot_be_tuned_is_wrong_usage(
    repository: Path, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    assert main(["tune", *words, "--repository", str(repository), *GOAL]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--budget", "2s"], "'2s' is no time from 5s to 120min"),
        (["--budget", "5 min"], "is no time"),
        (["--rows", "0"], "must lie between 1 and 65536"),
        (["--arrivals", "trace"], "invalid choice"),
        (["--replicas", "65"], "must lie between 1 and 64"),
    ],
)
def test_a_bad_flag_is_wrong_usage(
    repository: Path, capsys: pytest.CaptureFixture[str], flags: list[str], why: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tune", "double", "--repository", str(repository), *GOAL, *flags])
    assert ended.value.code == 2 and why in capsys.readouterr().err


def test_a_configuration_that_is_none_is_refused_with_its_place(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "double/config.pbtxt").write_text(DOUBLE + "max_batch: 3\n")
    assert main(["tune", "double", "--repository", str(repository), *GOAL]) == 2
    assert "double/config.pbtxt: model configuration: " in capsys.readouterr().err
    (repository / "double/config.pbtxt").write_bytes(b"\xff")
    assert main(["tune", "double", "--repository", str(repository), *GOAL]) == 2
    assert "is not text in UTF-8" in capsys.readouterr().err


def test_a_million_answers_cost_what_their_replicas_do() -> None:
    reached = Reached(objective=parse("p99 <= 1 s at 50/s"), calls=100, attained=1.0, latency_ms=9.0, goodput=50.0)
    best = Measured(setting=Setting(max_rows=0, instances=1, threads=1, replicas=3), reached=[reached])
    present = Measured(setting=replace(best.setting, replicas=1), reached=[replace(reached, goodput=0.0)])
    price = Price(name="p", device_class="t4", currency="USD", valid_from="2026-01-01", device_hour=round(0.9 * NANO))
    later = replace(price, valid_from="2027-01-01", device_hour=NANO)
    bytes_only = Price(name="q", device_class="", currency="USD", valid_from="2026-01-01", gib_out=NANO)
    (cost,) = costs([price, later, bytes_only], "2026-11-25", present, best)
    assert cost["per_hour"] == pytest.approx(2.7) and cost["per_million_present"] is None
    assert cost["per_million"] == pytest.approx(2.7 / (50.0 * 3600.0) * 1e6)
