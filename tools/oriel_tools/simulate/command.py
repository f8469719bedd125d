"""`oriel simulate`: what a load would get from some servers, and the profiles that this needs."""

import argparse

from oriel_tools.simulate import calibrate, serve

ACTIONS = {
    "serve": (serve, "replay a load against the real queue, limit and batch rules in virtual time"),
    "profile": (calibrate, "measure how long a model's batches take on a running server, for `simulate serve`"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions and their flags."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (module, text) in ACTIONS.items():
        module.add_arguments(actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}."))


def run(args: argparse.Namespace) -> int:
    """Run one action; see its module."""
    return int(ACTIONS[args.action][0].run(args))
