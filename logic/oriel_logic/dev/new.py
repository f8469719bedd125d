"""`oriel logic new NAME`: makes a folder with a service that runs, its test, a sample input and its settings."""

import argparse
import builtins
import keyword
import re
import sys
from importlib.resources import files
from pathlib import Path

from oriel_logic.services.definition import NAME
from oriel_wire.errors import StartFailed

SCAFFOLD = "scaffold"
SUFFIX = ".txt"
# Names that the scaffold's own lines use.
RESERVED = frozenset(
    {*dir(builtins), "Client", "Models", "Verdict", "SPEC", "WORDS", "client", "models", "service", "spec"}
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", help="the name of the service and of its folder, which must not exist yet"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit code. Raises StartFailed."""
    folder = Path(args.name)
    made = make(folder)
    width = max(len(str(folder / file)) for file in made)
    for file, what in made.items():
        sys.stdout.write(f"{folder / file!s:<{width}}  {what}\n")
    sys.stdout.write(f"\nTest it:  python -m pytest {folder}\nRun it:   oriel logic dev {folder}\n")
    return 0


WHAT = {
    "handler.py": "the service",
    "fakes.py": "a fake of its model",
    "test_FUNCTION.py": "its test, without a server",
    "sample.json": "a sample input",
    "pyproject.toml": "its settings",
    "README.md": "the next steps",
}


def make(folder: Path) -> dict[str, str]:
    """Write the files of a new service into the new `folder`; return file name -> description.

    The last part of `folder` is the service's name. Raises StartFailed, and leaves nothing behind then.
    """
    name = folder.name
    if NAME.match(name) is None:
        raise StartFailed(f"{name[:64]!r} is not a service name: letters, digits, '.', '_' and '-', at most 64")
    words = {"NAME": name, "FUNCTION": identifier(name), "MODEL": f"{identifier(name)}_model"}
    templates = files("oriel_logic.dev") / SCAFFOLD
    texts = {
        file.replace("FUNCTION", words["FUNCTION"]): filled((templates / f"{file}{SUFFIX}").read_text("utf-8"), words)
        for file in WHAT
    }
    try:
        folder.mkdir()
    except FileExistsError:
        raise StartFailed(f"{folder} exists: choose another name, or remove it first") from None
    except OSError as refused:
        raise StartFailed(f"the folder {folder} cannot be made: {refused.strerror}") from refused
    for file, text in texts.items():
        (folder / file).write_text(text, "utf-8")
    return dict(zip(texts, WHAT.values(), strict=True))


def identifier(name: str) -> str:
    """Return a Python name close to a service's name."""
    found = re.sub(r"\W", "_", name)
    is_free = found.isidentifier() and not keyword.iskeyword(found) and found not in RESERVED
    return found if is_free else f"service_{found}"


def filled(text: str, words: dict[str, str]) -> str:
    return re.sub(r"\b(NAME|FUNCTION|MODEL)\b", lambda found: words[found[0]], text)
