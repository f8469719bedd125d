"""Measures the CPU time of our own code per request, to compare two states of the code.

python benchmarks/cost.py CASE [options]

inference  a tiny v2 request of the inference server, without sockets
logic      a request of a logic service with one model call, without sockets
refusals   a request that the gateway refuses, beside one that it forwards (needs wrk)
"""

from harness.cases import run

CASES = {
    "inference": "inference_bench.cost",
    "logic": "logic_bench.cost",
    "refusals": "gateway_bench.refusals",
}

if __name__ == "__main__":
    run(__doc__, CASES)
