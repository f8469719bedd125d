"""Parses the arguments of `oriel <command>`: a mistake is one line, and a flag is never guessed."""

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """argparse without abbreviated flags; an unknown flag is named before anything else, with the nearest known one.

    Ends the process with code `usage_code` and one line on stderr. Sub-parsers are of this class too.
    """

    usage_code = 2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        known = set(self._flags())
        for word in words:
            if word == "--":
                break
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in known:
                self.error(_unknown(flag, known))
        return super().parse_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.removeprefix("argument ").split())
        self.exit(self.usage_code, f"{self.prog}: {line} ('{self.prog} --help' lists what there is)\n")

    def _flags(self) -> Iterator[str]:
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for each in set(action.choices.values()):
                    yield from each._flags()


def _unknown(flag: str, known: set[str]) -> str:
    names = sorted(each.removeprefix("--") for each in known if each.startswith("--"))  # the dashes are always alike
    near = difflib.get_close_matches(flag.removeprefix("--"), names, n=1, cutoff=0.65)
    return f"unknown flag {flag[:64]}, did you mean --{near[0]}?" if near else f"unknown flag {flag[:64]}"
