"""Measures answers within their deadline, which a server gives under an open-loop load.

python benchmarks/goodput.py CASE [options]

servers    two tiers at 0.8 to 1.5 times the capacity: Oriel, the same server as a FIFO, Triton
expiry     by how much answers to expired requests miss their deadline
"""

from harness.cases import run

CASES = {"servers": "inference_bench.goodput", "expiry": "inference_bench.expiry"}

if __name__ == "__main__":
    run(__doc__, CASES)
