"""Compares the inference server with other servers.

python benchmarks/inference_server.py CASE [options]

suite     `peers` and `goodput.py servers`; writes a page into benchmarks/results
peers     CPU per request, rate, latency and memory, closed loop, any v2 server
openvino  OpenVINO beside the plain CPU provider, without servers: time and CPU time of a run, error
"""

from harness.cases import run

CASES = {
    "suite": "inference_bench.suite",
    "peers": "inference_bench.peers",
    "openvino": "inference_bench.openvino",
}

if __name__ == "__main__":
    run(__doc__, CASES)
