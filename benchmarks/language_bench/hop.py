"""CPU of one streamed token on its way through a gateway: `python benchmarks/language.py hop`.

    [--streams 100 500] [--seconds 6] [--rounds 2] [--only oriel envoy ...] [--out FOLDER]

A stand-in for an engine (peers/language/tokens.py) makes a step each 50 ms, which gives every stream a token: an event
of OpenAI's chat completions of 190 bytes. A stream has 200 tokens, and another one follows it, so that one 200th of
what a call and its connection cost is in the cost of each token; the first ones begin within four seconds and have a
random share of 200, so that they do not end together. Contenders take turns (A B C, A B C) with one process each, as
they come: Oriel's gateway with a key, a tier and limits, Envoy and Portkey's gateway without any, LiteLLM's proxy with
a key. Counted is the CPU time (user + system, from /proc) of the contender's processes from the fifth second on, for
each token that reached the clients meanwhile; the medians are compared.

    oriel                   the gateway
    oriel, with logic       gateway and logic server together, before two inference servers whose engine is the strict
                            double, which makes a step each 50 ms and answers with the text of the question (their CPU
                            is not counted)

Targets: both of ours at most 1.5 x Envoy and 0.1 x LiteLLM, at 100 and at 500 streams.
"""

import random
import secrets
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gateway_bench.contenders import start
from harness.environments import node_package, python_of
from harness.pages import Verdict, table
from harness.processes import PEERS, accepts, cpu_s, free_port, gateway, serving

from language_bench.page import Part, options
from language_bench.plans import Target, over_http
from language_bench.stack import bearer, logic, policies

OURS, BOUNDS = ("oriel", "oriel, with logic"), {"envoy": 1.5, "litellm": 0.1}
DOUBLE = {"oriel.engine": "double", "oriel.double.step_ms": "50", "oriel.max_running": "256"}
CONTENDERS, TOKENS, BEGIN_S, WARM_S = (*OURS, "envoy", "litellm", "portkey"), 200, 4.0, 5.0
Started = tuple[list[int], int, str]  # process ids, port, lines that its clients add to a head


def contender(name: str, folder: Path, upstream: int, stack: ExitStack) -> Started:
    """Start one proxy before the port `upstream`."""
    port = free_port()
    if name in OURS:
        pids = []
        if name != "oriel":
            pid, upstream = stack.enter_context(logic(folder / "logic", DOUBLE))
            pids.append(pid)
        pid, port, _ = stack.enter_context(gateway(policies(folder / f"policies-{len(pids)}", upstream)))
        return [*pids, pid], port, bearer("bronze")
    if name == "envoy":
        pid, port = stack.enter_context(start(name, folder, upstream))
        return [pid], port, ""
    key, python = f"sk-{secrets.token_hex(32)}", sys.executable
    if name == "litellm":
        python, file = str(python_of(name)), folder / "litellm.yaml"
        given = f"{{ model: openai/chat, api_base: 'http://127.0.0.1:{upstream}/v1', api_key: none }}"
        file.write_text(f"model_list:\n  - {{ model_name: chat, litellm_params: {given} }}\n")
        command = [python, str(Path(python).parent / name), "--config", str(file), "--port", str(port)]
        header, environment = f"authorization: Bearer {key}", {"LITELLM_MASTER_KEY": key}
    else:
        script = node_package("@portkey-ai/gateway") / "build" / "start-server.js"
        command = ["node", str(script), f"--port={port}", "--headless"]
        environment = {"TRUSTED_CUSTOM_HOSTS": "127.0.0.1"}
        header = f"authorization: Bearer {key}\r\nx-portkey-provider: openai\r\n"
        header += f"x-portkey-custom-host: http://127.0.0.1:{upstream}/v1"
    pid = stack.enter_context(serving(command, lambda: accepts(port), environment, own_session=False))
    return [pid], port, header


def _chat(_: Sequence[int], tokens: int) -> dict[str, Any]:
    asked = {"model": "chat", "messages": [{"role": "user", "content": "x" * tokens}], "stream": True}
    return {**asked, "max_tokens": tokens}


def _count(event: bytes) -> int:
    return int(b'"content"' in event and b'"content":""' not in event)


def turn(started: Started, streams: int, seconds: float) -> tuple[float, float]:
    """CPU-microseconds of a token and tokens per second, of one turn."""
    pids, port, header = started
    target = Target(port, "/v1/chat/completions", _chat, _count, lambda: sum(map(cpu_s, pids)))
    calls = [[[[], tokens] for tokens in (random.randint(1, TOKENS), *[TOKENS] * 3)] for _ in range(streams)]
    each = [{"at": n * BEGIN_S / streams, "header": header, "calls": some} for n, some in enumerate(calls)]
    found = over_http(target, {"since": WARM_S, "until": WARM_S + seconds, "streams": each})
    if failed := {call.reason for call in found.calls if not call.arrivals and call.reason.startswith("HTTP")}:
        sys.exit(f"{failed.pop()}")
    tokens = found.tokens(range(streams))
    return found.cpu_s * 1e6 / tokens, tokens / (found.until - found.since)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[100, 500])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    args = parser.parse_args()
    part, rows = Part("hop", __doc__, args.out), []
    with ExitStack() as stack:
        folder, upstream = Path(stack.enter_context(tempfile.TemporaryDirectory())), free_port()
        stand_in = [sys.executable, str(PEERS / "language" / "tokens.py"), str(upstream)]
        stack.enter_context(serving(stand_in, lambda: accepts(upstream), own_session=False))
        started = {name: contender(name, folder, upstream, stack) for name in args.only}
        for streams in args.streams:
            turns: dict[str, list[tuple[float, float]]] = {name: [] for name in started}
            for number in range(args.rounds):
                for name, each in started.items():
                    turns[name].append(turn(each, streams, args.seconds))
                    print(streams, number + 1, name, *turns[name][-1], file=sys.stderr, flush=True)
            cost = {name: statistics.median(us for us, _ in its) for name, its in turns.items()}
            for name, its in turns.items():
                span, rate = f"{min(its)[0]:.1f}-{max(its)[0]:.1f}", statistics.median(rate for _, rate in its)
                rows.append((str(streams), name, f"{cost[name]:.1f}", span, f"{rate:,.0f}"))
            part.verdicts += [
                Verdict(
                    target=f"{streams} streams, {ours}: CPU <= {bound:g} x {peer}",
                    found=f"{cost[ours] / cost[peer]:.2f} x",
                    met=cost[ours] <= bound * cost[peer],
                )
                for ours in set(OURS) & set(cost)
                for peer, bound in BOUNDS.items()
                if peer in cost
            ]
    part.finish(table(("streams", "contender", "CPU-us per token", "min-max", "tokens/s of the clients"), rows))
