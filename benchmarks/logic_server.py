"""Compares a logic server with other frameworks and with a bare function.

python benchmarks/logic_server.py CASE [options]

call     a service with one model call, beside FastAPI, bare ASGI, LitServe and BentoML
jpeg     1 MB of JPEG decoded in worker processes, beside the bare function
through  what model calls cost more through the gateway than directly
"""

from harness.cases import run

CASES = {
    "call": "logic_bench.call",
    "jpeg": "logic_bench.jpeg",
    "through": "logic_bench.through",
}

if __name__ == "__main__":
    run(__doc__, CASES)
