"""`oriel trace <request-id>`: shows one request's trace from the buffer of the running `oriel up`.

With `--admin URL` it shows what that gateway has kept of the request instead: its own stages, and what the servers
behind reported. They report durations and not beginnings, so these are drawn one after the other.
"""

import argparse
import asyncio
import json
import sys
import time
from typing import Any
from urllib.parse import quote, urlsplit

from oriel_cli import probe, state
from oriel_cli.admin import TOKEN, address, document
from oriel_cli.errors import CommandFailed
from oriel_cli.watch import waterfall
from oriel_wire.observe.server_timing import read_server_timing

PATIENCE_S = 2.0
POLL_S = 0.2
# Units post their spans every 0.2 s: after this long without a new one, the trace is whole.
SETTLED_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", help="the x-request-id of an answer")
    parser.add_argument("--admin-port", type=int, metavar="N", help="which 'oriel up', by its admin port (8082)")
    parser.add_argument(
        "--admin", metavar="URL", help=f"admin port of another gateway, http://HOST:PORT; its token comes from {TOKEN}"
    )
    parser.add_argument("--json", action="store_true", help="print the spans as one line of JSON")


def run(args: argparse.Namespace) -> int:
    if args.admin:
        found = asyncio.run(kept(*address(args.admin), args.request_id))
    else:
        found = asyncio.run(fetch(state.pick(args.admin_port).traces, args.request_id))
    if args.json:
        print(json.dumps({"request_id": args.request_id, "trace_id": found["trace_id"], "spans": found["spans"]}))
        return 0
    ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
    for line in waterfall.draw(args.request_id, found["trace_id"], found["spans"], ascii_only=ascii_only):
        print(line)
    return 0


async def kept(host: str, port: int, request_id: str) -> dict[str, Any]:
    """Return what a gateway has kept of a request, as `fetch` returns a trace. Raises CommandFailed."""
    found = (await document(host, port, f"/decisions/{quote(request_id, safe='')}"))["decisions"]
    if not found:
        raise CommandFailed("the gateway has kept no call with this request id: it keeps the latest 4,096")
    decision = found[0]
    spans: list[dict[str, Any]] = []

    def add(name: str, unit: str, begin_ms: float, took_ms: float, parent: str = "", **attributes: Any) -> None:
        begin, end = (round(at * 1e6) for at in (begin_ms, begin_ms + took_ms))
        at = {"start_ns": begin, "end_ns": end, "span_id": str(len(spans) + 1), "parent_id": parent}
        spans.append({"name": name, "unit": unit, **at, "attributes": attributes, "error": ""})

    facts = {name: decision[name] for name in ("reason", "status", "pool", "endpoint") if decision.get(name)}
    took, at_ms = dict(decision["stages_ms"]), 0.0
    add(decision.get("target") or "request", "gateway", 0.0, took.pop("total"), tier=decision["tier"], **facts)
    for stage, stage_ms in took.items():
        add(stage, "gateway", at_ms, stage_ms, "1")
        if stage == "upstream":
            parent, inside_ms = str(len(spans)), at_ms
            for name, seconds in read_server_timing(decision["server_timing"] or "").items():
                add(name, "upstream", inside_ms, seconds * 1e3, parent)
                inside_ms += seconds * 1e3
        at_ms += stage_ms
    return {"trace_id": decision["trace_id"], "spans": spans}


async def fetch(base: str, request_id: str) -> dict[str, Any]:
    """The trace of `request_id` from the buffer at `base`, as its JSON document.

    Late spans are waited for, at most `PATIENCE_S`. Raises CommandFailed when the buffer does not know the request or
    does not answer.
    """
    address = urlsplit(base)
    host, port = address.hostname or "127.0.0.1", address.port or 0
    deadline = time.monotonic() + PATIENCE_S
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
                "there is no trace with this request id: pass the x-request-id of one of the last 500 sampled answers"
            )
        await asyncio.sleep(POLL_S)
