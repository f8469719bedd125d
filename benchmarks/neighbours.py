"""Measures how long small requests wait because of other clients or large bodies.

python benchmarks/neighbours.py CASE [options]

gateway           clients of the gateway that send or read slowly, and 2,000 idle connections
http2             clients of the gateway that attack it over HTTP/2
flood             more requests of a lower tier than the gateway can even refuse: who is in time
bad-rows          one caller whose rows fail, in the same batches
large-bodies      one body of 60 MiB: JSON, binary, gzip, a load request with a file
on-demand         thirty models called by Zipf's law on a server with memory for seven
hostile-requests  275 attacks on the inference server, one after the other
hostile           attacks by tenants with small limits on a gateway, a logic and an inference server
"""

from harness.cases import run

CASES = {
    "gateway": "gateway_bench.neighbours",
    "http2": "gateway_bench.http2_floods",
    "flood": "gateway_bench.flood",
    "bad-rows": "inference_bench.bad_rows",
    "large-bodies": "inference_bench.large_bodies",
    "on-demand": "inference_bench.on_demand",
    "hostile-requests": "inference_bench.hostile_requests",
    "hostile": "gateway_bench.hostile",
}

if __name__ == "__main__":
    run(__doc__, CASES)
