"""Measures answers within their deadline per second under open-loop load.

python benchmarks/goodput.py CASE [options]

servers     the inference server beside a FIFO and Triton
simulation  the batcher alone in virtual time, against a FIFO
prediction  how far `oriel simulate serve` is from measured loads
tuner       what `oriel tune` finds beside a grid search with as much time
shift       two models whose share of the load turns from 1:10 to 10:1
expiry      how late the answers to expired requests are
"""

from harness.cases import run

CASES = {
    "servers": "inference_bench.goodput",
    "simulation": "inference_bench.goodput_simulation",
    "prediction": "inference_bench.prediction",
    "tuner": "inference_bench.tuner",
    "shift": "inference_bench.shift",
    "expiry": "inference_bench.expiry",
}

if __name__ == "__main__":
    run(__doc__, CASES)
