"""Gold's tokens beside bronze streams that never end: `python benchmarks/language.py tiers --model FILE.gguf`.

    [--loads 1 2 5] [--seconds 35] [--out FOLDER]

Gateway and inference server, as they come, with the documents of `stack.py`. Bronze is a closed loop: 16 streams, as
many as the engine runs at once, at load 1, 32 at load 2, 80 at load 5; each sends its next call when the last one has
ended: a prompt of 200 random tokens, an answer of 100. Gold's calls come at random moments (Poisson), one a second,
whatever comes back: a prompt of 100 random tokens, an answer of 30. They count from the fifth second on; the last ones
come four seconds before the end.

Gold's tier says `target_ms = 500` and `token_ms = 25`: a call is in target if its first token came within 500 ms, its
mean time from token to token is at most 25 ms, and all its tokens came. The control has the same arrivals on the bare
engine in one process, with the same SchedulerConfig, in order of arrival, without gateway or server.

Targets at each load: gold in target >= 99 %; no bronze stream that had begun ended early; all tokens per second of the
platform at least 0.9 x those of the control, so that pausing costs less than a tenth; in every two seconds in which
tokens came, bronze got at least its floor, 5 % of them.
"""

import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from harness.pages import Verdict, table
from harness.processes import cpu_s, gateway

from language_bench.page import Part, options
from language_bench.plans import GIVEN_UP, Call, Plan, Played, bare, generate_stream, over_http, prompt
from language_bench.stack import ENGINE, RUNNING, bearer, model_server, policies

FIRST_S, TOKEN_S, ANSWER = 0.5, 0.025, 30
WARM_S, LAST_S, SLICE_S, FLOOR = 5.0, 4.0, 2.0, 0.05
COLUMNS = ("gold calls", "in target", "first token ms: p50, p99", "ms a token: p50, p99", "bronze tokens/s")
COLUMNS += ("all tokens/s", "bronze lost", "bronze refused", "longest silence s", "least share of bronze")


def plan(load: int, seconds: float) -> Plan:
    """The plan of one phase; its first `load * RUNNING` streams are bronze."""
    chance, streams, at = random.Random(load), [], WARM_S
    for _ in range(load * RUNNING):
        calls = [[prompt(chance, 200), 100] for _ in range(int(seconds))]
        streams.append({"at": 0.0, "calls": calls, "header": bearer("bronze")})
    while (at := at + chance.expovariate(1.0)) < seconds - LAST_S:
        streams.append({"at": at, "calls": [[prompt(chance, 100), ANSWER]], "header": bearer("gold")})
    return {"since": WARM_S, "until": seconds, "streams": streams}


def good(call: Call) -> bool:
    """Return whether a call of gold was in target."""
    return call.tokens == ANSWER and call.first_s <= FIRST_S and call.token_s <= TOKEN_S


def spread(some: Sequence[float]) -> str:
    """Median and 99th percentile of these seconds, in milliseconds."""
    return f"{1e3 * statistics.median(some):.0f}, {1e3 * sorted(some)[int(0.99 * len(some))]:.0f}" if some else "-"


def figures(played: Played, bronze: range) -> list[tuple[str, float]]:
    """Each of COLUMNS, as it is shown and as it is judged."""
    gold = [call for call in played.calls if call.stream not in bronze]
    theirs = [call for call in played.calls if call.stream in bronze]
    ended = [call for call in theirs if call.reason not in ("", GIVEN_UP)]
    for reason in {call.reason[:400] for call in (*ended, *gold) if call.reason}:
        print(reason, file=sys.stderr)
    silences = [b[0] - a[0] for call in theirs for a, b in zip(call.arrivals, call.arrivals[1:], strict=False)]
    shares, everybody, at = [1.0], range(1 << 30), WARM_S
    while (at := at + SLICE_S) < played.until:
        if whole := played.tokens(everybody, at - SLICE_S, at):
            shares.append(played.tokens(bronze, at - SLICE_S, at) / whole)
    share, seconds = sum(map(good, gold)) / max(1, len(gold)), played.until - played.since
    lost = sum(1 for call in ended if call.arrivals)
    rates = [played.tokens(some) / seconds for some in (bronze, everybody)]
    firsts, steps = (
        [each for call in gold if call.arrivals for each in (getattr(call, what),)] for what in ("first_s", "token_s")
    )
    numbers = (*rates, lost, len(ended) - lost)
    return [
        *((f"{len(gold)}", 0.0), (f"{share:.1%}", share), (spread(firsts), 0.0), (spread(steps), 0.0)),
        *((f"{number:.0f}", number) for number in numbers),
        *((f"{max(silences, default=0.0):.1f}", 0.0), (f"{min(shares):.0%}", min(shares))),
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 2, 5])
    parser.add_argument("--seconds", type=float, default=35.0)
    args = parser.parse_args()
    part, rows = Part("tiers", __doc__, args.out), []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(model_server(args.model, folder))
        pid, port, _ = stack.enter_context(gateway(policies(folder / "policies", server.port)))
        whole = generate_stream(port, lambda: server.cpu_s() + cpu_s(pid))
        engine = stack.enter_context(bare(args.model, *ENGINE))
        for load in args.loads:
            offered, bronze = plan(load, args.seconds), range(load * RUNNING)
            ours = figures(over_http(whole, offered), bronze)
            control = figures(engine(offered), bronze)
            for name, found in (("oriel", ours), ("bare engine", control)):
                rows.append((str(load), name, *(text for text, _ in found)))
                print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
            ratio = ours[5][1] / control[5][1]
            part.verdicts += [
                Verdict(target=f"load {load}: {what}", found=text, met=met)
                for what, text, met in (
                    ("gold in target >= 99 %", f"{ours[1][0]}, control {control[1][0]}", ours[1][1] >= 0.99),
                    ("no bronze stream lost", ours[6][0], not ours[6][1]),
                    ("all tokens/s >= 0.9 x control", f"{ratio:.2f} x", ratio >= 0.9),
                    ("bronze's floor, 5 % of each two seconds", ours[9][0], ours[9][1] >= FLOOR),
                )
            ]
    part.finish(table(("load", "", *COLUMNS), rows))
