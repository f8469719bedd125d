"""Measures what a server does under an open-loop load of calls with deadlines.

python benchmarks/goodput.py CASE [options]

expiry     by how much answers to expired requests miss their deadline
"""

from harness.cases import run

CASES = {"expiry": "inference_bench.expiry"}

if __name__ == "__main__":
    run(__doc__, CASES)
