"""Measures whether a request costs more when there is more of everything around it.

python benchmarks/growth.py CASE [options]

gateway        100,000 tenants, 1,000 routes or 1,000 endpoints at the gateway (needs wrk)
http2          5,000 idle HTTP/2 connections and 10,000 idle streams at the gateway: memory of each
gateway-queue  10,000 calls that wait in the gateway's queue (no sockets)
parked         100,000 calls that wait for the first server of a pool (no sockets)
routes         the look-up of a request's target among 1,000 routes (no sockets)
model-queue    10,000 calls that wait in a model's queue (no sockets)
repository     a model repository with 1,000 models and with 100 versions
"""

from harness.cases import run

CASES = {
    "gateway": "gateway_bench.growth",
    "http2": "gateway_bench.http2_growth",
    "gateway-queue": "gateway_bench.queue_growth",
    "parked": "gateway_bench.parked_growth",
    "routes": "gateway_bench.routes",
    "model-queue": "inference_bench.queue_growth",
    "repository": "inference_bench.repository_growth",
}

if __name__ == "__main__":
    run(__doc__, CASES)
