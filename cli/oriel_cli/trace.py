"""`oriel trace <request-id>`: shows one request's trace from the buffer of the running `oriel up`."""

import argparse
import asyncio
import json
import sys
import time
from typing import Any
from urllib.parse import quote, urlsplit

from oriel_cli import probe, state, waterfall
from oriel_cli.errors import CommandFailed

PATIENCE_S = 2.0
POLL_S = 0.2
# Units post their spans every 0.2 s: after this long without a new one, the trace is whole.
SETTLED_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", help="the x-request-id of an answer")
    parser.add_argument("--admin-port", type=int, metavar="N", help="which 'oriel up', by its admin port (8082)")
    parser.add_argument("--json", action="store_true", help="print the spans as one line of JSON")


def run(args: argparse.Namespace) -> int:
    instance = state.pick(args.admin_port)
    found = asyncio.run(fetch(instance.traces, args.request_id))
    if args.json:
        print(json.dumps({"request_id": args.request_id, "trace_id": found["trace_id"], "spans": found["spans"]}))
        return 0
    ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
    for line in waterfall.draw(args.request_id, found["trace_id"], found["spans"], ascii_only=ascii_only):
        print(line)
    return 0


async def fetch(base: str, request_id: str, *, patience_s: float = PATIENCE_S) -> dict[str, Any]:
    """The trace of `request_id` from the buffer at `base`, as its JSON document.

    Late spans are waited for, at most `patience_s`. Raises CommandFailed when the buffer does not know the request or
    does not answer.
    """
    address = urlsplit(base)
    host, port = address.hostname or "127.0.0.1", address.port or 0
    deadline = time.monotonic() + patience_s
    while True:
        answer = await probe.get(host, port, f"/traces/{quote(request_id, safe='')}", timeout_s=PATIENCE_S)
        late = time.monotonic() >= deadline
        if answer is None:
            raise CommandFailed("the running 'oriel up' does not answer: is it stopping?")
        if answer.status == 200 and isinstance(answer.document, dict):
            if late or answer.document["age_s"] >= SETTLED_S:
                return answer.document
        elif late:
            raise CommandFailed(
                "no trace with this request id: it is the x-request-id of a sampled answer, the last 500 are kept"
            )
        await asyncio.sleep(POLL_S)
