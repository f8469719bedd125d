"""Measures language models: our servers beside their bare engine, and what a token costs on its way.

python benchmarks/language.py CASE [options]

speed      tokens per second through the inference server, beside its bare engine
tiers      gold's first token and time per token beside 1, 2 and 5 times as many bronze streams as the engine runs
hop        CPU of one streamed token in gateway and logic, beside Envoy, LiteLLM and Portkey
"""

from harness.cases import run

CASES = {name: f"language_bench.{name}" for name in ("speed", "tiers", "hop")}

if __name__ == "__main__":
    run(__doc__, CASES)
