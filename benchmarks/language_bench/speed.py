"""Tokens per second through the inference server and of its bare engine: `python benchmarks/language.py speed`.

    --model FILE.gguf [--streams 1 4 16] [--rounds 5] [--llama-server PROGRAM]
    [--onnxruntime-genai PYTHON FOLDER] [--out FOLDER]

All streams of a turn begin at once; each makes two calls, one after the other. A call has a prompt of 200 random
tokens, which no prefix cache has seen, and a greedy answer of exactly 100 tokens. Contenders take turns with the same
prompts (A B C, A B C); a turn's rate is the tokens of its answers by the seconds until the last one has come.

    oriel               `oriel inference` with the model's folder, over HTTP (`generate_stream`), as it comes
    bare engine         openvino-genai's ContinuousBatchingPipeline in one process, the same SchedulerConfig and threads
    llama.cpp           its server with the same file, 16 slots and as many threads; if there is one
    onnxruntime-genai   one batch in one process, the model with 4 bits a weight; if there is a Python that has it

Target: Oriel's rate at least 0.95 x that of the bare engine, at each number of streams (median of the rounds' ratios).
"""

import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness.pages import Verdict, table
from harness.processes import cpu_s, free_port, serving, status_of

from language_bench.page import Part, options
from language_bench.plans import Plan, Played, Target, bare, over_http, prompt
from language_bench.stack import ENGINE, RUNNING, THREADS, model_server

CALLS, PROMPT, ANSWER, BOUND = 2, 200, 100, 0.95


def plan(streams: int, seed: str) -> Plan:
    """The plan of one turn; the same for the same seed."""
    chance = random.Random(seed)
    calls = [[[prompt(chance, PROMPT), ANSWER] for _ in range(CALLS)] for _ in range(streams)]
    return {"since": 0, "until": None, "streams": [{"at": 0, "header": "", "calls": each} for each in calls]}


def _completion(ids: Any, tokens: int) -> dict[str, Any]:
    return {"prompt": ids, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "stream": True}


def llama(program: str, model: Path, stack: ExitStack) -> Target:
    """The server of llama.cpp."""
    port = free_port()
    command = [program, "-m", str(model), "--port", str(port), "-np", str(RUNNING), "-t", str(THREADS)]
    ready = f"http://127.0.0.1:{port}/health"
    pid = stack.enter_context(serving([*command, "-c", str(RUNNING * 512)], lambda: status_of(ready) == 200))
    return Target(port, "/completion", _completion, lambda event: event.count(b'"stop":false'), lambda: cpu_s(pid))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-server")
    parser.add_argument("--onnxruntime-genai", nargs=2, metavar=("PYTHON", "FOLDER"))
    args = parser.parse_args()
    part, rows = Part("speed", __doc__, args.out), []
    with ExitStack() as stack:
        server = stack.enter_context(model_server(args.model, Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        play: dict[str, Callable[[Plan], Played]] = {"oriel": lambda plan: over_http(server, plan)}
        play["bare engine"] = stack.enter_context(bare(args.model, *ENGINE))
        if args.llama_server:
            other = llama(args.llama_server, args.model, stack)
            play["llama.cpp"] = lambda plan: over_http(other, plan)
        if args.onnxruntime_genai:
            python, folder = args.onnxruntime_genai
            third = bare(folder, python=python, program="ort_batch.py")
            play["onnxruntime-genai"] = stack.enter_context(third)
        for each in play.values():
            each(plan(2, "warm-up"))
        for streams in args.streams:
            wanted = streams * CALLS * ANSWER
            turns: dict[str, list[tuple[float, float]]] = {name: [] for name in play}
            for number in range(args.rounds):
                for name, each in play.items():
                    found = each(plan(streams, f"{streams}-{number}"))
                    if found.tokens(range(streams)) != wanted:
                        sys.exit(f"{name} made {found.tokens(range(streams))} tokens: {found.calls[0].reason}")
                    turns[name].append((wanted / found.until, found.cpu_s * 1e3 / wanted))
                    print(streams, number + 1, name, *turns[name][-1], file=sys.stderr, flush=True)
            for name, its in turns.items():
                ratio = statistics.median(a[0] / b[0] for a, b in zip(turns["oriel"], its, strict=True))
                rate, cpu = (statistics.median(column) for column in zip(*its, strict=True))
                span = f"{min(its)[0]:.0f}-{max(its)[0]:.0f}"
                rows.append((str(streams), name, f"{rate:.0f}", span, f"{cpu:.2f}", f"{ratio:.2f}"))
                if name == "bare engine":
                    target = f"{streams} streams: tokens/s >= {BOUND:g} x bare engine"
                    part.verdicts.append(Verdict(target=target, found=f"{ratio:.2f} x", met=ratio >= BOUND))
    part.finish(table(("streams", "contender", "tokens/s", "min-max", "CPU-ms per token", "oriel / it"), rows))
