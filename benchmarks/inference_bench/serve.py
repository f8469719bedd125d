"""`oriel inference` with an audit: `python serve.py --audit FILE --model-repository DIR ...`.

Counts, where a batch begins to run, the calls whose deadline has passed by then; written to FILE at the end.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from oriel_inference.backends import Session
from oriel_inference.batching import assemble
from oriel_inference.batching.assemble import Outcome
from oriel_inference.batching.call import Call
from oriel_inference.batching.device import Device
from oriel_inference.command import add_arguments, run
from oriel_inference.model import ModelSpec


class Audit:
    """Written by the batches' threads, one at a time per model instance."""

    def __init__(self) -> None:
        self.calls = 0
        self.expired = 0
        self._run = assemble._run

    def run(
        self,
        session: Session,
        spec: ModelSpec,
        names: Sequence[str],
        calls: Sequence[Call],
        now: Callable[[], float],
        device: Device,
    ) -> Outcome:
        moment = now()
        self.calls += len(calls)
        self.expired += sum(call.deadline <= moment for call in calls)
        return self._run(session, spec, names, calls, now, device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--audit", type=Path, required=True, metavar="FILE")
    add_arguments(parser)
    args = parser.parse_args()
    audit = Audit()
    assemble._run = audit.run
    code = run(args)
    args.audit.write_text(json.dumps({"calls": audit.calls, "expired": audit.expired}))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
