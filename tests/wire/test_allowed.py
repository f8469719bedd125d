"""What a field of a fixed set may be, said beside what it was."""

import enum
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pytest

from oriel_wire.process.allowed import MAX_LISTED, listed, with_values


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class One(msgspec.Struct, tag="one"):
    colour: Colour


class Two(msgspec.Struct, tag="two"):
    size: Literal[1, 2]


@dataclass
class Plain:
    colour: Colour


class Typed(TypedDict):
    shade: Literal["dark"]


class Body(msgspec.Struct):
    colour: Colour | None = None
    either: list[One | Two] = []
    by_colour: dict[Colour, Plain] = {}
    pair: tuple[int, Colour] = (1, Colour.RED)
    typed: Typed | None = None
    bounded: Annotated[list[Annotated[Colour, msgspec.Meta(title="x")]], msgspec.Meta(max_length=3)] = []
    count: int = 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"colour": "green"}, "Invalid enum value 'green', it is one of 'red', 'blue' - at `$.colour`"),
        ({"either": [{"type": "three"}]}, "Invalid value 'three', it is one of 'one', 'two' - at `$.either[0].type`"),
        ({"either": [{"type": "two", "size": 7}]}, "Invalid enum value 7, it is one of 1, 2 - at `$.either[0].size`"),
        ({"by_colour": {"green": {}}}, "'green', it is one of 'red', 'blue' - at `key` in `$.by_colour`"),
        ({"by_colour": {"red": {"colour": "x"}}}, "'x', it is one of 'red', 'blue' - at `$.by_colour[...].colour`"),
        ({"pair": [1, "x"]}, "Invalid enum value 'x', it is one of 'red', 'blue' - at `$.pair[1]`"),
        ({"typed": {"shade": "x"}}, "Invalid enum value 'x', it is one of 'dark' - at `$.typed.shade`"),
        ({"bounded": ["x"]}, "Invalid enum value 'x', it is one of 'red', 'blue' - at `$.bounded[0]`"),
        ({"count": "x"}, "Expected `int`, got `str` - at `$.count`"),
    ],
)
def test_the_values_of_the_place_are_listed(given: Any, said: str) -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert(given, Body)
    assert said in with_values(error.value, Body)


def test_a_long_list_is_cut() -> None:
    text = listed(f"value-{number}" for number in range(1000))
    assert text.startswith("'value-0', 'value-1'") and "more" in text and len(text) < MAX_LISTED + 20
