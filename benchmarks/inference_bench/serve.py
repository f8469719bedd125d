"""`oriel inference` for the bench: optionally as a plain FIFO, optionally with an audit of what is executed.

    python serve.py [--fifo] [--audit FILE] --model-repository DIR ...

--fifo: calls go in order of arrival, whatever their deadline and tier; batches wait for the configuration's
`max_queue_delay_microseconds`; nothing expires, nothing is refused for being late. All else is the same server.
--audit: counts, where a batch begins to run, the calls whose deadline has passed by then; written to FILE at the end.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from oriel_inference import assembly
from oriel_inference.backends import Session
from oriel_inference.batching import assemble
from oriel_inference.batching.assemble import Outcome
from oriel_inference.batching.batcher import Batcher
from oriel_inference.batching.call import Call
from oriel_inference.batching.device import Device
from oriel_inference.command import add_arguments, run
from oriel_inference.model import ModelSpec
from oriel_policies.waiting.flows import Ticket

__all__ = ["FifoBatcher"]

# Later than any deadline and the same for all: equal ones go in order of arrival.
NEVER_S = 1e8


class FifoBatcher(Batcher):
    """The production batcher whose calls have neither deadline nor tier."""

    def submit(self, call: Call) -> None:
        ticket = call.ticket
        call.deadline = NEVER_S
        call.ticket = Ticket(
            band=0,
            tenant="",
            deadline=NEVER_S,
            cost=ticket.cost,
            size_bytes=ticket.size_bytes,
            rows=call.rows,
            payload=call,
        )
        super().submit(call)


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
    parser.add_argument("--fifo", action="store_true")
    parser.add_argument("--audit", type=Path, metavar="FILE")
    add_arguments(parser)
    args = parser.parse_args()
    if args.fifo:
        assembly.Batcher = FifoBatcher  # type: ignore[misc]
    audit = Audit()
    assemble._run = audit.run
    code = run(args)
    if args.audit:
        args.audit.write_text(json.dumps({"calls": audit.calls, "expired": audit.expired}))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
