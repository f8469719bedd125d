"""Measures whether what one call is promised still holds over time, under attack and across starts.

python benchmarks/soak.py CASE [options]

gateway    ten minutes of a gateway: memory, descriptors, p99, answers
hostile    attacks by tenants with small limits: what they cost, and what another tenant feels of them
services   calls of a service while its logic server and its model start from zero: how many are lost
"""

from harness.cases import run

CASES = {
    "gateway": "gateway_bench.soak",
    "hostile": "gateway_bench.hostile",
    "services": "gateway_bench.service_starts",
}

if __name__ == "__main__":
    run(__doc__, CASES)
