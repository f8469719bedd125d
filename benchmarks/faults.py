"""Measures what is lost, and for how long, when something fails under load.

python benchmarks/faults.py CASE [options]

endpoint  an upstream server that is killed or hangs
compound  a flood, a killed server, a flapping Redis and changing documents at once
worker    kill -9 of a logic server's worker every second
"""

from harness.cases import run

CASES = {
    "endpoint": "gateway_bench.faults",
    "compound": "gateway_bench.compound",
    "worker": "logic_bench.kills",
}

if __name__ == "__main__":
    run(__doc__, CASES)
