"""Configurations and lists of variables that never end take steps by their length."""

from contextlib import suppress

import pytest

from oriel_inference.errors import ConfigInvalid
from oriel_inference.repository.config import parse
from oriel_wire.process.environment import names_of, selected

from ..steps import linear


@pytest.mark.parametrize(
    "text",
    [
        '"',
        "'",
        "# ",
        "{",
        "input [",
        "input [{",
        "dims: [1, ",
        "name: 'a' ",
        "\\",
        "\n",
        "input { dims: 1 }\n",
        "<",
        ": ",
    ],
)
def test_a_configuration(text: str) -> None:
    def work(size: int) -> None:
        with suppress(ConfigInvalid):
            parse("name: 'm'\n" + text * size, "m/config.pbtxt")

    linear(work, (100, 200, 400))


@pytest.mark.parametrize("text", ["A", "A,", ",", "*", "A*,", "A" * 255])
def test_a_list_of_variables(text: str) -> None:
    def work(size: int) -> None:
        names_of(text * size)
        selected({f"A{number}": text for number in range(size)}, ["A*"])

    linear(work, (200, 400, 800))
