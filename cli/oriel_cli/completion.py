"""`oriel completion bash|zsh|fish`: prints a script, made from the parsers, to complete commands and flags."""

import argparse
import importlib
from pathlib import Path

import shtab

from oriel_cli.arguments import Parser

SHELLS = ("bash", "zsh", "fish")
HOW = """examples:
  bash  oriel completion bash > ~/.local/share/bash-completion/completions/oriel
  zsh   oriel completion zsh > DIR/_oriel      (DIR being one of $fpath)
  fish  oriel completion fish > ~/.config/fish/completions/oriel.fish"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="whose script")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = HOW


def run(args: argparse.Namespace) -> int:
    print(shtab.complete(whole_parser(), shell=args.shell))
    return 0


def whole_parser() -> Parser:
    """One parser of all commands, as `main` reads them."""
    from oriel_cli.main import COMMANDS

    root = Parser(prog="oriel")
    root.add_argument("--version", action="store_true", help="print the version")
    commands = root.add_subparsers(metavar="COMMAND")
    made: dict[str, Parser] = {}
    beneath: dict[str, argparse._SubParsersAction[Parser]] = {}
    for name, entry in COMMANDS.items():
        first, _, second = name.partition(" ")
        if second and first not in beneath:
            beneath[first] = made[first].add_subparsers(metavar="COMMAND")
        parser = (beneath[first] if second else commands).add_parser(second or first, help=entry.summary)
        importlib.import_module(entry.module).add_arguments(parser)
        made[name] = parser
        _complete_paths(parser)
    return root


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    """Offer files or folders for options that take a path."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _complete_paths(each)
        elif action.type is Path or "DIR" in str(action.metavar):
            action.complete = shtab.DIRECTORY if "DIR" in str(action.metavar) else shtab.FILE  # type: ignore[attr-defined]
