import argparse
from pathlib import Path

import pytest

from oriel_cli.errors import CommandFailed
from oriel_tools.load.command import add_arguments, scenario_of
from oriel_tools.load.scenario import Scenario, read

ROOT = Path(__file__).resolve().parents[3]
GOOD = """
[[stream]]
name = "gold"
url = "http://127.0.0.1:1/x"
body = "b.json"
[[stream]]
name = "silver"
url = "grpc://127.0.0.1:1/a.B/C"
tier = "second"
[[phase]]
seconds = 2
rate = 10
"""


def parsed(folder: Path, text: str) -> Scenario:
    (folder / "s.toml").write_text(text)
    return read(folder / "s.toml")


def flags(*words: str) -> Scenario:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return scenario_of(parser.parse_args(words))


def test_a_file_becomes_streams_and_phases(tmp_path: Path) -> None:
    found = parsed(tmp_path, GOOD)
    gold, silver = found.stream
    assert (gold.tier, gold.body, silver.tier, silver.gives_up_s) == ("gold", str(tmp_path / "b.json"), "second", 10)
    assert (found.phase[0].name, found.phase[0].arrivals, found.seconds) == ("poisson", "poisson", 2)


def test_the_example_is_a_scenario() -> None:
    found = read(ROOT / "examples" / "load" / "tiers.toml")
    assert [stream.name for stream in found.stream] == ["gold", "silver", "bronze"]
    assert all(Path(stream.body).is_file() for stream in found.stream)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("rate = 10", "rate = -1"), "phase[0].rate"),
        (("rate = 10", "rte = 10"), "rte"),
        (("rate = 10", ""), "either 'rate' or 'rates'"),
        (("rate = 10", "rates = { bronze = 3 }"), "bronze, which is not the name of a stream"),
        (("rate = 10", 'arrivals = "trace"'), "'trace', a file"),
        (('"silver"', '"gold"'), "the same name"),
        (("http://", "https://"), "TLS"),
        (('"http://127.0.0.1:1/x"', '"http://127.0.0.1:99999/x"'), "no URL"),
        (('tier = "second"', 'key = "a\\nb"'), "printable"),
        (('tier = "second"', 'key_env = "ORIEL_ABSENT"'), "ORIEL_ABSENT"),
        (('body = "b.json"', 'body = "b.json"\nrows = 2'), "either 'body' or 'rows'"),
        (
            ("[[phase]]", '[[phase]]\narrivals = "poison"'),
            "it is one of 'bursty', 'poisson', 'ramp', 'trace', 'uniform'",
        ),
    ],
)
def test_a_mistake_is_named_with_its_file(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    with pytest.raises(CommandFailed) as refused:
        parsed(tmp_path, GOOD.replace(*change))
    assert said in str(refused.value) and str(tmp_path / "s.toml") in str(refused.value)


def test_flags_say_the_same_as_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    found = flags(
        *("--url", "http://h:1/x", "--rate", "5", "--seconds", "2", "--key-env", "A_KEY", "--target-ms", "20"),
        *("--deadline-ms", "80", "--header", "X-A: b: c", "--seed", "9", "--max-in-flight", "7"),
    )
    (stream,), (phase,) = found.stream, found.phase
    assert (stream.key, stream.headers, stream.target_ms, stream.gives_up_s) == ("secret", {"X-A": "b: c"}, 20, 1.08)
    assert (phase.rate, phase.seconds, found.seed, found.max_in_flight) == (5, 2, 9, 7)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--url"),
        (("--url", "http://h/x"), "--rate"),
        (("--url", "http://h/x", "--rate", "0"), "rate"),
        (("--url", "http://h/x", "--rate", "1", "--header", "x"), "name: value"),
        ((str(ROOT / "examples" / "load" / "tiers.toml"), "--rate", "1"), "in the file"),
        (("absent.toml",), "cannot be read"),
    ],
)
def test_flags_that_do_not_fit_are_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(CommandFailed, match=said):
        flags(*words)


def test_flags_that_always_hold_go_over_the_file() -> None:
    found = flags(str(ROOT / "examples" / "load" / "tiers.toml"), "--seed", "99", "--max-lag-ms", "5")
    assert (found.seed, found.max_lag_ms, len(found.stream)) == (99, 5, 3)
