"""`oriel simulate cost`: the published mix, and documents with mistakes."""

import json
from pathlib import Path

import pytest

from oriel_cli.main import main

MIX = Path(__file__).resolve().parents[2] / "examples/cost/mix.toml"
SMALL = """
[nodes.n]
cpus = 4
memory_gib = 8
hour = "0.000000001"
[services.s]
replicas = 3
cpus = 2
memory_gib = 1.5
"""


def test_the_published_totals_are_reproduced_and_beaten(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "cost", str(MIX), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [round(row["hour"]) for row in rows[:3]] == [37, 55, 33]
    assert rows[2]["hour"] == rows[2]["at_least"] == 33.0, "no packing into these nodes is cheaper"
    assert rows[-1]["hour"] == min([row["hour"] for row in rows]) < 33.0
    placed = sum([node["count"] * node["replicas"].get("tokens", 0) for node in rows[-1]["nodes"]])
    assert placed == 40


def test_the_table_names_every_row_and_the_nodes_of_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mix.toml"
    path.write_text(SMALL)
    assert main(["simulate", "cost", str(path)]) == 0
    text = capsys.readouterr().out
    assert "1 x n: 2 s" in text and "1 x n: 1 s" in text and "USD/hour" in text


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("cpus = 4", "cpus = -4"), "nodes"),
        (('hour = "0.000000001"', 'hour = "x"'), "nodes.n.hour"),
        (('hour = "0.000000001"', 'hour = "0.0000000001"'), "nine decimals"),
        (("cpus = 4", 'cpus = 4\naccelerator = "a"'), "go together"),
        (("replicas = 3", ""), "services.s needs 'replicas'"),
        (("cpus = 2", "cpus = 8"), "a replica of s fits on no kind of node"),
        (("replicas = 3", "replicas = 100001"), "replicas"),
        (("[nodes.n]", '[[compare]]\nname = "r"\nnodes = ["m"]\n[nodes.n]'), "'r': there is no node 'm'"),
        (
            ("memory_gib = 1.5", 'memory_gib = 1.5\naccelerator = "a"\n[[compare]]\nname = "r"\naccelerators = ["b"]'),
            "'r': s runs on none of b",
        ),
        (("[nodes.n]", "[nodes.n"), "mix.toml"),
    ],
)
def test_a_mistake_in_a_mix_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], why: str
) -> None:
    path = tmp_path / "mix.toml"
    path.write_text(SMALL.replace(*change))
    assert main(["simulate", "cost", str(path)]) == 1
    said = capsys.readouterr().err
    assert why in said and "mix.toml" in said
