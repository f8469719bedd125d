"""Counts the calls that cold starts refuse rightly, wrongly or too late: `python benchmarks/faults.py refused`.

    [--starts 300] [--calls 200] [--seed 1]

Virtual time: starts whose length varies around 90 s, the first of which is only guessed (60 s); one call per second of
each with a deadline of 1 to 240 s. The rules are those of `oriel_policies.scaling.cold_start`.

    refused       calls that the server came too late for, and that were refused at their arrival (promised: 95 %)
    held in vain  the others of them
    wrongly       calls that were refused although the server would have come in time
    retry-after   refusals whose Retry-After is within 25 % of the rest of the start, or a second (the header's unit)

Real time: a gateway in a process of its own in front of an empty pool, and calls one after the other whose deadline is
shorter than the start; the milliseconds from sending to the whole refusal (promised: 50 at the 99th percentile).
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from math import inf
from pathlib import Path
from random import Random

from tests.gateway.process import gateway_process
from tests.gateway.stack import GOLD, documents

from gateway_bench.pushes import p99
from oriel_policies.scaling import ColdStarts, hold_until, worth_holding

MEDIAN_S = 90.0
GUESS_S = 60.0
LONGEST_S = 240.0
TRUE_SHARE = 0.25
PROMISED_SHARE, PROMISED_MS = 0.95, 50.0


def judge(spread: float, starts: int, seed: int) -> tuple[float, float, float]:
    """Return the shares of late calls that were refused, of calls in time that were refused, and of true Retry-Afters.

    spread: standard deviation of the logarithm of a start's length.
    """
    chance = Random(seed)
    rule = ColdStarts(guess_s=GUESS_S, forget_s=inf)
    late = refused = in_time = wrongly = true = 0
    for number in range(starts):
        begins_s = number * 10_000.0
        ready_s = begins_s + MEDIAN_S * chance.lognormvariate(0.0, spread)
        now = begins_s
        while now < ready_s:
            rule.called(now, empty=True)
            until = hold_until(now, LONGEST_S, now + chance.uniform(1.0, LONGEST_S))
            held = worth_holding(now, rule.rest_s(now), until)
            if number:  # of the first start nothing is known
                late += until < ready_s
                in_time += until >= ready_s
                if not held:
                    refused += until < ready_s
                    wrongly += until >= ready_s
                    wait_s, rest_s = rule.retry_after_s(now) or 0, ready_s - now
                    true += abs(wait_s - rest_s) <= max(1.0, TRUE_SHARE * rest_s)
            now += 1.0
        rule.ready(ready_s)
    return refused / late, wrongly / in_time, true / (refused + wrongly)


async def times_ms(calls: int) -> list[float]:
    """Return how long each refusal took."""
    scaling = "[pools.p.scaling]\nminimum = 0\nmaximum = 1\nstart_ms = 60000\nhold_ms = 300000\n"
    text = documents([1], pool="", extra=scaling)["all.toml"].decode()
    lines = [line for line in text.split("\n") if not line.startswith(("endpoints", "grpc_endpoints"))]
    pool = '[pools.p]\nprobe = "/v2/health/ready"\ndiscover = "dns:no-such-name.invalid:1"'
    files = {"all.toml": "\n".join(lines).replace("[pools.p]", pool, 1).encode()}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        async with gateway_process(Path(folder), files) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            head = f"POST /v2/models/digits/infer HTTP/1.1\r\nhost: a\r\nx-api-key: {GOLD}\r\n"
            head += "x-request-timeout-ms: 5000\r\n"
            for _ in range(calls):
                sent_s = time.monotonic()
                writer.write(f"{head}content-length: 1000\r\n\r\n".encode())  # the body is not waited for
                answer = await reader.readuntil(b"\r\n\r\n")
                found.append((time.monotonic() - sent_s) * 1e3)
                if b" 503 " not in answer or b"retry-after: " not in answer.lower():
                    raise RuntimeError(answer.decode())
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=300)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.environ["OTEL_TRACES_SAMPLER_ARG"] = "0"  # of the gateway
    kept = True
    for spread in (0.05, 0.1, 0.2, 0.4):
        refused, wrongly, true = judge(spread, args.starts, args.seed)
        kept = kept and refused >= PROMISED_SHARE
        print(
            f"starts of {MEDIAN_S:.0f} s, spread {spread:.0%}: {refused:.1%} of the late calls refused at once, "
            f"{1 - refused:.1%} held in vain; {wrongly:.1%} of the others wrongly; {true:.1%} of Retry-After true"
        )
    took = asyncio.run(times_ms(args.calls))
    print(
        f"refusal after {sorted(took)[len(took) // 2]:.1f} ms (median), {p99(took):.1f} ms (p99) of {len(took)}; "
        f"promised {PROMISED_MS:.0f}; load average {os.getloadavg()[0]:.1f}"
    )
    sys.exit(int(not kept or p99(took) > PROMISED_MS))
