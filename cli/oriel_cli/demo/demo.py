"""`oriel demo` measures what batching brings, through the gateway on the models `mlp_single` (off) and `mlp` (on)."""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from oriel_cli import state
from oriel_cli.demo.closed_loop import Figures, Shot, drive
from oriel_cli.errors import CommandFailed
from oriel_cli.table import columns
from oriel_cli.up.demo_assets import DEMO_KEYS
from oriel_wire.engine.client import HttpClient
from oriel_wire.errors import UpstreamError
from oriel_wire.observe.trace import format_traceparent, new_trace

MODELS = {"mlp_single": "off", "mlp": "on"}
ROUNDS = 2
WARM_UP_S = 0.5
ANSWER_WITHIN_S = 10.0
BAR_COLUMNS = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--concurrency", type=int, default=16, metavar="N", help="requests under way at once (16)")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="how long each model is driven (5)")
    parser.add_argument("--admin-port", type=int, metavar="N", help="which 'oriel up', by its admin port")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(args: argparse.Namespace) -> int:
    if args.concurrency < 1 or args.concurrency > 1024 or not 0 < args.seconds <= 600:
        raise CommandFailed("--concurrency must be 1 to 1024, --seconds above 0 and at most 600")
    with _gateway(args.admin_port) as (host, port):
        try:
            measured = asyncio.run(_measure(host, port, args.concurrency, args.seconds))
        except UpstreamError as error:
            raise CommandFailed(f"the gateway does not answer: {error}") from error
    if args.json:
        print(json.dumps({"concurrency": args.concurrency, "models": measured}))
    else:
        print("\n".join(_lines(measured, args.concurrency)))
    return 1 if any(model["others"] for model in measured.values()) else 0


@contextlib.contextmanager
def _gateway(admin_port: int | None) -> Iterator[tuple[str, int]]:
    """Yield the address of the running demo's gateway; if none runs, start one for as long as the context lasts."""
    try:
        instance = state.pick(admin_port)
    except CommandFailed:
        if admin_port is not None:
            raise
        instance = None
    if instance is not None and instance.demo:
        host, _, port = instance.gateway.rpartition(":")
        yield host.strip("[]"), int(port)
        return
    _progress("no demo runs here: starting one on free ports")
    command = [
        sys.executable,
        "-P",
        "-m",
        "oriel_cli.main",
        "up",
        "--demo",
        "--free-ports",
        "--json",
        "--usage",
        "none",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as started:
        try:
            assert started.stdout is not None
            line = started.stdout.readline()
            if not line:
                raise CommandFailed("the demo could not be started: see the line above")
            address = json.loads(line)["units"][0]["addresses"]["http"]
            host, _, port = address.rpartition(":")
            yield host, int(port)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(started.pid, signal.SIGTERM)


async def _measure(host: str, port: int, callers: int, seconds: float) -> dict[str, dict[str, Any]]:
    client = HttpClient(host=host, port=port, max_connections=callers)
    try:
        shots = {name: await _shot(client, name) for name in MODELS}
        figures = {name: Figures() for name in MODELS}
        executed: dict[str, dict[int, int]] = {name: {} for name in MODELS}
        for shot in shots.values():
            await drive(client, shot, callers=callers, duration_s=WARM_UP_S)
        # In turns, so that a machine that gets slower or faster meanwhile treats both alike.
        for number in range(ROUNDS):
            for name, shot in shots.items():
                _progress(f"round {number + 1} of {ROUNDS}: {name} (batching {MODELS[name]})")
                before = await _histogram(client, name)
                figures[name].add(await drive(client, shot, callers=callers, duration_s=seconds / ROUNDS))
                for rows, count in (await _histogram(client, name)).items():
                    more = count - before.get(rows, 0)
                    if more:
                        executed[name][rows] = executed[name].get(rows, 0) + more
    finally:
        await client.close()
    return {
        name: {
            "batching": MODELS[name],
            **figures[name].as_document(),
            "executions_by_rows": {str(rows): count for rows, count in sorted(executed[name].items())},
        }
        for name in MODELS
    }


async def _shot(client: HttpClient, model: str) -> Shot:
    import numpy as np

    from oriel_wire.v2.http import encode_request
    from oriel_wire.v2.messages import InferRequest, Tensor

    metadata = await _document(client, f"/v2/models/{model}")
    described = metadata["inputs"][0]
    shape = tuple(1 if size < 0 else size for size in described["shape"])
    row = np.random.default_rng(1).random(shape, dtype=np.float32)
    request = InferRequest(model_name=model, inputs=[Tensor(described["name"], described["datatype"], shape, row)])
    parts, header_length = encode_request(request)
    return Shot(
        target=f"/v2/models/{model}/infer",
        headers=[
            *_headers(),
            ("content-type", "application/octet-stream"),
            ("inference-header-content-length", str(header_length)),
        ],
        body=b"".join(parts),
    )


def _headers() -> list[tuple[str, str]]:
    # Not sampled: spans of a load would push every other trace out of the buffer and cost what they measure.
    return [
        ("authorization", f"Bearer {DEMO_KEYS['gold']}"),
        ("traceparent", format_traceparent(new_trace(sampled=False))),
    ]


async def _histogram(client: HttpClient, model: str) -> dict[int, int]:
    stats = await _document(client, f"/v2/models/{model}/stats")
    batches = stats["model_stats"][0].get("batch_stats", [])
    return {int(batch["batch_size"]): int(batch["compute_infer"]["count"]) for batch in batches}


async def _document(client: HttpClient, target: str) -> Any:
    answer = await client.request("GET", target, _headers(), deadline=time.monotonic() + ANSWER_WITHIN_S)
    if answer.status != 200:
        raise CommandFailed(f"the gateway answered {answer.status} for {target}: does 'oriel up --demo' run there?")
    return json.loads(answer.body)


def _lines(measured: Mapping[str, Mapping[str, Any]], callers: int) -> list[str]:
    rows = [
        (
            name,
            model["batching"],
            f"{model['requests_per_s']:.0f}",
            f"{model['p50_ms']:.2f}",
            f"{model['p99_ms']:.2f}",
            f"{_mean_rows(model['executions_by_rows']):.1f}",
            sum(model["others"].values()),
        )
        for name, model in measured.items()
    ]
    heading = ("model", "batching", "req/s", "p50 ms", "p99 ms", "rows per run", "failed")
    lines = [f"{callers} requests under way, one row each, through the gateway:", ""]
    lines += columns(heading, rows, right={2, 3, 4, 5, 6})
    for name, model in measured.items():
        lines += ["", f"{name}: runs by rows", *_bars(model["executions_by_rows"])]
    return lines


def _mean_rows(executions: Mapping[str, int]) -> float:
    runs = sum(executions.values())
    return sum(int(rows) * count for rows, count in executions.items()) / runs if runs else 0.0


def _bars(executions: Mapping[str, int]) -> list[str]:
    largest = max(executions.values(), default=0)
    return [
        f"  {rows:>4} {count:>8}  {'#' * max(1, round(count * BAR_COLUMNS / largest))}"
        for rows, count in executions.items()
    ]


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
