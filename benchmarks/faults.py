"""Measures what is lost, and for how long, when something fails under load.

python benchmarks/faults.py CASE [options]

endpoint  an upstream server that is killed or hangs
compound  a flood, a killed server, a flapping Redis and changing documents at once
worker    kill -9 of a logic server's worker every second
waking    how soon 1,000 held calls are sent when the only server of a pool becomes ready
usage     what tenants are charged beside the time of the device: overload, cancels, kill -9
pushes    how soon KEDA hears that an empty pool is called, also through another gateway and after a gateway has ended
"""

from harness.cases import run

CASES = {
    "endpoint": "gateway_bench.faults",
    "compound": "gateway_bench.compound",
    "worker": "logic_bench.kills",
    "waking": "gateway_bench.waking",
    "usage": "inference_bench.usage",
    "pushes": "gateway_bench.pushes",
}

if __name__ == "__main__":
    run(__doc__, CASES)
