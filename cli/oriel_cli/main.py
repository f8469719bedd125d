"""`oriel <command>`: looks the command up in a table and imports only what that command needs."""

import difflib
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from oriel_cli.arguments import Parser
from oriel_cli.errors import CommandFailed
from oriel_wire.distribution import NAME
from oriel_wire.errors import StartFailed


@dataclass(frozen=True, slots=True)
class _Entry:
    module: str
    summary: str


COMMANDS = {
    "up": _Entry("oriel_cli.up.up", "start gateway, logic and inference under one supervisor (--demo: with examples)"),
    "demo": _Entry("oriel_cli.demo.demo", "drive the demo model with batching off and on and print what it brings"),
    "trace": _Entry("oriel_cli.watch.trace", "print one request's trace as a waterfall"),
    "top": _Entry("oriel_cli.watch.top", "watch a gateway: tiers, pools, models, tenants, the latest misses"),
    "slo": _Entry("oriel_cli.watch.slo", "print which promises of tiers are kept, and what is left of their budgets"),
    "load": _Entry("oriel_tools.load.command", "offer a load on schedule and print what became of it (open loop)"),
    "simulate": _Entry("oriel_tools.simulate.command", "replay a load in virtual time against servers and policies"),
    "tune": _Entry("oriel_tools.tune.command", "find the settings of a model that reach an objective"),
    "gateway": _Entry("oriel_gateway.command", "run the gateway alone"),
    "logic": _Entry("oriel_logic.command", "run a logic server alone"),
    "logic new": _Entry("oriel_logic.dev.new", "make a folder with a service, its test, a sample and its settings"),
    "logic dev": _Entry("oriel_logic.dev_command", "run a service while you write it: reloads when you save"),
    "logic build": _Entry("oriel_logic.dev.build", "make a folder from which an image of your services is built"),
    "inference": _Entry("oriel_inference.command", "run an inference server alone"),
    # `tritonserver`, also as the first word behind the image's entry point.
    "inference tritonserver": _Entry("oriel_cli.tritonserver", "run one as tritonserver, with Triton's defaults"),
    "models": _Entry("oriel_cli.models.models", "list, load and unload a server's models, and check a repository"),
    "engines": _Entry("oriel_cli.models.engines", "list, build, verify and remove the compiled artefacts of models"),
    "policies": _Entry("oriel_cli.policies.policies", "check the documents that promise service levels"),
    "state": _Entry("oriel_gateway.backup", "save quotas, objectives and the usage ledger in a file, and back"),
    "usage": _Entry("oriel_cli.usage.command", "export what tenants used, with prices; check that nothing is missing"),
    "keys": _Entry("oriel_cli.policies.keys", "make an API key"),
    "doctor": _Entry("oriel_cli.doctor.command", "check an installation end to end, and say how to fix what is wrong"),
    "completion": _Entry("oriel_cli.completion", "print a script that completes commands and flags in a shell"),
    "version": _Entry("oriel_cli.version", "print the version"),
}
# The garbage collector finds next to nothing in what is imported, but walks it dozens of times: a tenth of the start.
IMPORTING = (20_000, 5, 20)
LOGGING = ("up", "gateway", "logic", "inference", "inference tritonserver")  # commands that write a log
# Package that is not among the base dependencies -> the extra of Oriel that installs it.
EXTRAS = {"grpc": "tools", "onnxruntime": "cpu", "onnx": "demo", "redis": "redis"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 wrong usage or cannot start, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        words[0] = "version"
    name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    entry = COMMANDS.get(name)
    if entry is None:
        return _refuse(f"there is no command {words[0][:64]!r}{_near(words)} ('oriel --help' lists them)", 2)
    if name == words[0] and words[1:] and not words[1].startswith("-") and (near := _near(words, under=name)):
        return _refuse(f"there is no command {' '.join(words[:2])[:64]!r}{near}", 2)
    if name in LOGGING:
        gc.set_threshold(*IMPORTING)
        _choose_log_format(words)
    try:
        command = importlib.import_module(entry.module)
        parser = Parser(prog=f"oriel {name}", description=f"{entry.summary}.", epilog=_beside(name))
        command.add_arguments(parser)
        return int(command.run(parser.parse_args(words[name.count(" ") + 1 :])))
    except StartFailed as failure:
        return _refuse(str(failure), 2)
    except CommandFailed as failure:
        return _refuse(str(failure), 1)
    except ModuleNotFoundError as missing:
        package = (missing.name or "").split(".")[0]
        if not package or package.startswith("oriel_"):
            raise
        return _refuse(_missing(package), 2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left ("oriel trace ... | head"): write nothing more, also not at exit.
        sys.stdout = sys.stderr
        return 0


def _choose_log_format(words: Sequence[str]) -> None:
    """Put the value of --log-format into the environment, where children find it, and begin to write JSON if it is
    that: early, so that nothing is printed before.
    """
    for word, following in pairwise([*words, ""]):
        flag, is_whole, value = word.partition("=")
        if flag == "--log-format":
            os.environ["ORIEL_LOG_FORMAT"] = value if is_whole else following
    if os.environ.get("ORIEL_LOG_FORMAT") == "json":
        from oriel_wire.process.logs import capture

        capture(words[0])


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {entry.summary}" for name, entry in COMMANDS.items()]
    return "\n".join(["usage: oriel <command> [options]", "", *lines, "", "'oriel <command> --help' lists its options"])


def _beside(name: str) -> str | None:
    """Return the sentence with which a command's help lists its subcommands; None if it has none."""
    under = [f"oriel {each}: {entry.summary}" for each, entry in COMMANDS.items() if each.startswith(f"{name} ")]
    return f"Beside it: {'; '.join(under)}." if under else None


def _near(words: Sequence[str], under: str = "") -> str:
    """Return the text "did you mean ...?" for a mistyped command; "" if no command is similar.

    under: the command that was recognised, if the word after it is none of its subcommands.
    """
    near: list[str] = []
    if not under:
        near = difflib.get_close_matches(words[0], [name for name in COMMANDS if " " not in name], n=1, cutoff=0.65)
    beside = [name for name in COMMANDS if " " in name and name.startswith(under)]
    near = difflib.get_close_matches(" ".join(words[:2]), beside, n=1, cutoff=0.75) or near
    return f", did you mean {near[0]!r}?" if near else ""


def _missing(package: str) -> str:
    extra = EXTRAS.get(package)
    wanted = f"'{NAME}[{extra}]'" if extra else NAME
    return f"the Python package {package!r} is missing: in a checkout run 'make clean setup', else pip install {wanted}"


def _refuse(line: str, code: int) -> int:
    from oriel_wire.process.logs import write_refusal

    write_refusal(f"oriel: {' '.join(line.split())}")
    return code


if __name__ == "__main__":
    sys.exit(main())
