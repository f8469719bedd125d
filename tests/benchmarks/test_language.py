"""Figures that the language benches compute from the tokens that came, and the page that each part adds to."""

from pathlib import Path

import pytest
from harness.pages import Verdict
from language_bench.page import Part
from language_bench.plans import GIVEN_UP, Call, Played
from language_bench.tiers import ANSWER, figures

BRONZE = range(2)


def call(stream: int, sent: float, first: float, each: float, tokens: int, said: str = "") -> Call:
    return Call(stream, sent, [(sent + first + number * each, 1) for number in range(tokens)], said)


def test_gold_is_in_target_with_all_its_tokens_in_time() -> None:
    calls = [
        call(0, 0.0, 1.0, 0.1, 300, GIVEN_UP),
        call(1, 0.0, 1.0, 0.1, 100, "closed after b''"),
        call(1, 15.0, 1.0, 0.1, 0, "HTTP/1.1 503"),
        call(2, 6.0, 0.4, 0.02, ANSWER),
        call(3, 7.0, 0.6, 0.02, ANSWER),
        call(4, 8.0, 0.4, 0.03, ANSWER),
        call(5, 9.0, 0.4, 0.02, ANSWER - 1, "closed after b''"),
    ]
    found = figures(Played(5.0, 25.0, 0.0, calls), BRONZE)
    assert [text for text, _ in found[:2]] == ["4", "25.0%"]
    assert found[2][0] == "400, 600" and found[3][0] == "20, 30"
    assert [value for _, value in found[4:8]] == [pytest.approx(13.0, abs=0.1), pytest.approx(19.0, abs=0.1), 1, 1]
    assert found[8][0] == "0.1" and 0.1 < found[9][1] < 0.5


def test_each_part_of_the_page_stays_when_another_is_written(tmp_path: Path) -> None:
    for name, met in (("hop", True), ("speed", False), ("hop", True)):
        part = Part(name, "About it.", tmp_path)
        part.verdicts.append(Verdict(target="a target", found="1 x", met=met))
        with pytest.raises(SystemExit) as ended:
            part.finish("| a table |")
        assert ended.value.code == int(not met)
    (page,) = tmp_path.glob("*-language.md")
    text = page.read_text()
    assert text.count("## hop") == text.count("## speed") == 1
    assert text.count("MISSED") == 1 and text.count("Conditions: processor") == 2
