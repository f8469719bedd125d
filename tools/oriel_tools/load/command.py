"""`oriel load`: offers a load on schedule, whatever the server does, and reports the results."""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import uvloop

from oriel_cli.errors import CommandFailed
from oriel_tools.load.bodies import Prepared, prepare
from oriel_tools.load.generator import Generator, Record, schedule
from oriel_tools.load.plot import as_html
from oriel_tools.load.report import as_document, as_text, progress_line
from oriel_tools.load.scenario import Phase, Scenario, Stream, checked, read
from oriel_tools.load.senders import GrpcSender, HttpSender, Sender
from oriel_wire.distribution import installed_version
from oriel_wire.engine.upstream import Endpoint
from oriel_wire.process.allowed import with_values

EXIT_FAILED = 1  # a phase is not quoted, or nothing was answered well
EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", nargs="?", type=Path, help="a TOML file with streams and phases (docs/load.md)")
    one = parser.add_argument_group("one stream, one phase, without a file")
    one.add_argument("--url", help="http://host:port/path or grpc://host:port/v2/models/NAME")
    one.add_argument("--rate", type=float, help="arrivals per second")
    one.add_argument("--seconds", type=float, help="how long (10)")
    one.add_argument("--arrivals", choices=("poisson", "bursty", "ramp", "uniform"), help="arrival process (poisson)")
    one.add_argument(
        "--trace",
        metavar="FILE",
        help="replay arrivals instead: a line per arrival, seconds from the start; or a gateway's access log",
    )
    one.add_argument("--body", metavar="FILE", help="file with the body to send")
    one.add_argument("--rows", type=int, help="instead of --body: this many rows of random inputs for a v2 model")
    one.add_argument("--encoding", choices=("raw", "json", "binary"), help="how a v2 request travels (raw: as it is)")
    one.add_argument("--content-type", metavar="TYPE")
    one.add_argument("--method", help="HTTP method (POST)")
    one.add_argument("--header", action="append", metavar="NAME: VALUE", help="may be given several times")
    one.add_argument("--key", help="sent as 'Authorization: Bearer KEY'")
    one.add_argument("--key-env", metavar="NAME", help="environment variable that holds the key")
    one.add_argument("--tier", help="a label for the report")
    one.add_argument("--target-ms", type=float, help="an answer is in time within this, from its scheduled arrival")
    one.add_argument("--deadline-ms", type=float, help="sent to the server with each request")
    one.add_argument("--timeout", dest="timeout_s", type=float, metavar="S", help="give a request up after this (10)")
    both = parser.add_argument_group("always")
    both.add_argument("--seed", type=int, help="of the arrivals (1)")
    both.add_argument("--max-in-flight", type=int, metavar="N", help="requests under way at once (1024)")
    both.add_argument("--max-lag-ms", type=float, metavar="MS", help="lag up to which a phase is quoted (10)")
    both.add_argument("--plot", type=Path, metavar="FILE", default=Path("oriel-load.html"), help="(oriel-load.html)")
    both.add_argument("--no-plot", action="store_true")
    both.add_argument("--json", metavar="FILE", help="write the figures there; '-': to stdout, instead of the table")
    both.add_argument("--record", type=Path, metavar="FILE", help="write the arrivals there, as a trace to replay")
    both.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    scenario = scenario_of(args)
    written = [
        None if args.no_plot else args.plot,
        args.record,
        Path(args.json) if args.json not in (None, "-") else None,
    ]
    for path in filter(None, written):
        if not path.parent.is_dir():
            raise CommandFailed(f"{path}: there is no such folder")  # now, not after an hour's load
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        record = runner.run(offer(scenario, quiet=args.quiet))
    document = as_document(scenario, record, version=installed_version())
    if args.json == "-":
        print(json.dumps(document))
    else:
        print("\n".join(as_text(document)))
        if args.json:
            write(Path(args.json), json.dumps(document) + "\n")
    if args.record is not None:
        write(args.record, "".join(trace_lines(scenario, until_s=record.ran_s)))
    if not args.no_plot:
        write(args.plot, as_html(document))
        print(f"\nplot: {args.plot}", file=sys.stderr)
    if record.interrupted:
        return EXIT_INTERRUPTED
    answered = any(phase["all"]["good"] for phase in document["phases"])
    return 0 if document["quoted"] and answered else EXIT_FAILED


def trace_lines(scenario: Scenario, *, until_s: float) -> Iterator[str]:
    """Yield the lines of a trace that replays the arrivals of all phases in one, up to `until_s` from the first."""
    for offset, _, stream in schedule(scenario):
        if offset >= until_s:
            return
        yield f"{offset:.6f},{scenario.stream[stream].name}\n"


def write(path: Path, text: str) -> None:
    """Write a file. Raises CommandFailed."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as refused:
        raise CommandFailed(f"{path}: cannot be written ({refused.strerror})") from refused


def scenario_of(args: argparse.Namespace) -> Scenario:
    """Return the scenario of the file or of the flags. Raises CommandFailed."""
    always: dict[str, Any] = {
        name: value
        for name in ("seed", "max_in_flight", "max_lag_ms")
        if (value := getattr(args, name, None)) is not None
    }
    given = {
        name: value
        for name in (*Stream.__struct_fields__, *Phase.__struct_fields__)
        if (value := getattr(args, name, None)) is not None
    }
    if (headers := getattr(args, "header", None)) is not None:
        given["headers"] = dict([_header(line) for line in headers])
    if args.scenario is not None:
        if given:
            raise CommandFailed(f"a scenario file was given: put {', '.join(sorted(given))} in the file instead")
        scenario = read(args.scenario)
        found = {**msgspec.structs.asdict(scenario), **always}
        return _converted(found)
    if args.url is None:
        raise CommandFailed("give a scenario file, or --url")
    if args.rate is None and args.trace is None:
        raise CommandFailed("give --rate, or --trace")
    if args.trace is not None:
        given = {**given, "arrivals": "trace"}
    stream = {name: given[name] for name in Stream.__struct_fields__ if name in given}
    phase = {"seconds": 10.0, **{name: given[name] for name in Phase.__struct_fields__ if name in given}}
    return checked(_converted({**always, "stream": [stream], "phase": [phase]}), Path())


def _converted(found: dict[str, Any]) -> Scenario:
    try:
        return msgspec.convert(found, Scenario, from_attributes=True)
    except msgspec.ValidationError as wrong:
        raise CommandFailed(with_values(wrong, Scenario)) from wrong


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name.strip():
        raise CommandFailed(f"--header {line!r}: write 'name: value'")
    return name.strip(), value.strip()


async def offer(scenario: Scenario, *, quiet: bool = True) -> Record:
    """Run `scenario` and return its results; SIGINT ends it early. Cancelled: nothing is left behind."""
    prepared = [await prepare(stream) for stream in scenario.stream]
    senders = _senders(scenario, prepared)
    generator = Generator(scenario, senders)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, generator.interrupt)
    progress = None if quiet else loop.create_task(_progress(scenario, generator))
    try:
        await generator.run()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        if progress is not None:
            progress.cancel()
            await asyncio.gather(progress, return_exceptions=True)
        for sender in senders:
            await sender.close()
    return generator.record


def _senders(scenario: Scenario, prepared: Sequence[Prepared]) -> list[Sender]:
    endpoints: dict[tuple[str, int], Endpoint] = {}
    senders: list[Sender] = []
    for stream, request in zip(scenario.stream, prepared, strict=True):
        if request.grpc:
            deadline_s = stream.deadline_ms / 1e3 if stream.deadline_ms is not None else None
            senders.append(GrpcSender(request, scenario.grpc_channels, deadline_s=deadline_s))
        else:
            where = (request.host, request.port)
            endpoint = endpoints.setdefault(where, Endpoint(*where))
            senders.append(HttpSender(request, endpoint))
    return senders


async def _progress(scenario: Scenario, generator: Generator) -> None:
    began = monotonic()
    step_s = max(1.0, scenario.seconds / 60)
    while True:
        await asyncio.sleep(step_s)
        line = progress_line(scenario, generator.record, monotonic() - began, generator.under_way)
        print(line, file=sys.stderr, flush=True)
