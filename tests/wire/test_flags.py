"""Flags come from the metadata of a settings class, and its fields are read back from what was parsed."""

import argparse
from dataclasses import dataclass, field

import pytest

from oriel_wire.process.flags import Group, add_flags, flag, flags, number, switch, values

NET = Group("net")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    port: int = field(default=80, metadata=flag("--port", type=number(int, 0, 65535), help="where"))
    host: str = field(
        default="a",
        metadata=flags(NET.flag("--host", help="address"), NET.flag("--open", dest="opened", type=switch)),
    )
    peers: tuple[str, ...] = field(default=("self",), metadata=flag("--peer", action="append"))
    name: str | None = field(default=None, metadata=flag("--name"))
    inner: int = 7


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, Settings)
    return parser.parse_args(words)


def test_defaults_stand_in_the_settings_alone() -> None:
    assert Settings(**values(Settings, parse())) == Settings()


def test_given_flags_set_their_fields_and_lists_become_tuples() -> None:
    args = parse("--port", "0", "--host", "b", "--peer", "x", "--peer", "y", "--name", "n", "--open", "on")
    assert Settings(**values(Settings, args)) == Settings(port=0, host="b", peers=("x", "y"), name="n")
    assert args.opened is True, "a flag with a destination of its own is left to the command"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--port", "x"], "'x' is not a number"),
        (["--port", "65536"], "must lie between 0 and 65535"),
        (["--open", "maybe"], "'maybe' is neither true nor false"),
    ],
)
def test_a_value_that_does_not_fit_is_named(words: list[str], text: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=text):
        parse(*words)


def test_the_type_of_a_field_says_how_its_flag_is_read_and_named() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Typed:
        on: bool = NET.setting(False, "--on")
        most: int | None = NET.setting(None, "--most")
        wait_s: float = NET.setting(1.0, "--wait")
        every: tuple[str, ...] = NET.setting((), "--every")

    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, Typed)
    args = parser.parse_args("--on true --most 3 --wait 0.5 --every x --every y".split())
    assert values(Typed, args) == {"on": True, "most": 3, "wait_s": 0.5, "every": ("x", "y")}
    assert "--on BOOL --most N --wait S --every EVERY" in " ".join(parser.format_help().split()).replace("  ", " ")


def test_flags_stand_under_their_heading_in_the_order_of_the_fields() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Settings)
    text = parser.format_help().partition("options:")[2]
    assert text.index("--port") < text.index("--peer") < text.index("net:") < text.index("--host HOST")
