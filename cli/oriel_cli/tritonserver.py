"""`tritonserver`: `oriel inference` with Triton's defaults, exit code and log lines, for what was written for Triton.

The image's entry point is `oriel inference`, so that a container with the arguments `tritonserver --model-store=...`
runs this as well. docs/tritonserver-flags.md lists the flags, and what stays stricter than Triton.
"""

import argparse
import sys

from oriel_cli.arguments import Parser
from oriel_cli.errors import CommandFailed
from oriel_cli.main import main as run_command
from oriel_cli.version import text as version_text
from oriel_wire.errors import StartFailed


def main() -> int:
    """Run the command and return its exit code: 0 stopped as asked, 1 anything else, as Triton does."""
    return run_command(["inference", "tritonserver", *sys.argv[1:]])


def add_arguments(parser: Parser) -> None:
    """Add the flags of `oriel inference`, with the defaults of Triton that are safe."""
    from oriel_inference import command

    command.add_arguments(parser)
    parser.add_argument("--version", action="version", version=version_text(), help="print the version")
    parser.set_defaults(host="0.0.0.0", server_id="triton", as_triton=True)
    parser.usage_code = 1


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. Raises CommandFailed if the server cannot start."""
    from oriel_inference import command

    try:
        return min(command.run(args), 1)
    except StartFailed as failure:
        raise CommandFailed(str(failure)) from failure
