"""Measures the CPU time of our own code per request, to compare two states of the code.

python benchmarks/cost.py CASE [options]

inference  a tiny v2 request of the inference server, without sockets
inference-grpc  the same as a unary gRPC call
logic      a request of a logic service with one model call, without sockets
gateway    an HTTP/1.1 request of the gateway, without sockets
grpc       a unary gRPC call of the gateway, without sockets
refusals   a request that the gateway refuses, beside one that it forwards (needs wrk)
memory     memory of a gateway per tenant, key, model, connection and waiting call, and of a logic worker
"""

from harness.cases import run

CASES = {
    "inference": "inference_bench.cost",
    "inference-grpc": "inference_bench.grpc_cost",
    "logic": "logic_bench.cost",
    "gateway": "gateway_bench.http_cost",
    "grpc": "gateway_bench.grpc_cost",
    "refusals": "gateway_bench.refusals",
    "memory": "gateway_bench.memory",
}

if __name__ == "__main__":
    run(__doc__, CASES)
