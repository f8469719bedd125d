"""The page of the language benches: each part writes its own section, the others stay as they were."""

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from harness.environments import commit, machine
from harness.pages import Verdict, conditions, table, word, write_page

__all__ = ["Part", "options"]

ABOUT = (
    "Each part was measured by its own command, `python benchmarks/language.py PART`, under the load that its line of "
    "conditions names. The text under its heading is the command's own, and was written before anything was measured."
)


def options(doc: str | None) -> argparse.ArgumentParser:
    """The options that all parts have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file")
    parser.add_argument("--out", type=Path, help="folder of the page")
    return parser


class Part:
    """One part; made before it is measured, as the machine's load is noted then. about: the command's docstring."""

    def __init__(self, name: str, about: str | None, out: Path | None) -> None:
        self.name, self.about, self.out = name, (about or "").strip(), out
        self.where, self.verdicts = machine(os.cpu_count() or 1), list[Verdict]()

    def finish(self, text: str) -> None:
        """Print tables and verdicts, put them into the page of the day, and end with 1 if a target was missed."""
        judged = [(each.target, each.found, word(each.met)) for each in self.verdicts]
        text = f"{text}\n\n{table(('target', 'found', ''), judged)}\n"
        print(text)
        if self.out is not None:
            file = self.out / f"{datetime.now(UTC).date().isoformat()}-language.json"
            parts = json.loads(file.read_text())["parts"] if file.exists() else {}
            held = conditions(self.where, commit(), "min-max of the turns, or p50 and p99 of the calls")
            parts[self.name] = f"## {self.name}\n\n{held}\n\n```text\n{self.about}\n```\n\n{text}"
            write_page(self.out, "language", "Language models", ABOUT, "\n".join(parts.values()), {"parts": parts})
        sys.exit(int(any(each.met is False for each in self.verdicts)))
