"""Measures what is lost, and for how long, when something fails under load.

python benchmarks/faults.py CASE [options]

endpoint  an upstream server that is killed or hangs
compound  a flood, a killed server, a flapping Redis and changing documents at once
worker    kill -9 of a logic server's worker every second
waking    how soon 1,000 held calls are sent when the only server of a pool becomes ready
usage     what tenants are charged beside the time of the device: overload, cancels, kill -9
pushes    how soon KEDA hears that an empty pool is called, also through another gateway and after a gateway has ended
cold      calls for an empty pool whose server, gateway and scaling fail in the same moment
refused   calls that cannot be in time for a cold start: how many are refused at once, and how true Retry-After is
traces    whether each late or missed request of an overload has a whole trace at the collector
causes    whether the cause of a late call is the place that held it up, in each place of three servers
artefact  a compiled artefact that is built, checked and swapped in under load: calls that fail, and p99
services  calls of a service while its logic server and its model start from zero: how many are lost
local     `oriel up --scale-to-zero`: how soon the first call is answered, with a spare process
"""

from harness.cases import run

CASES = {
    "endpoint": "gateway_bench.faults",
    "compound": "gateway_bench.compound",
    "worker": "logic_bench.kills",
    "waking": "gateway_bench.waking",
    "usage": "inference_bench.usage",
    "pushes": "gateway_bench.pushes",
    "cold": "gateway_bench.cold_starts",
    "refused": "gateway_bench.cold_refusals",
    "artefact": "inference_bench.artefact_swap",
    "services": "gateway_bench.service_starts",
    "local": "gateway_bench.local_start",
    "traces": "gateway_bench.whole_traces",
    "causes": "gateway_bench.causes",
}

if __name__ == "__main__":
    run(__doc__, CASES)
