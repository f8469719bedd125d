"""Every command and snippet of the README, run as it stands there, with the ports of the test's stack."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from stacks import Stack

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return found


def here(text: str, stack: Stack) -> str:
    return text.replace("127.0.0.1:8080", stack.gateway).replace("127.0.0.1:8081", stack.address("gateway", "grpc"))


def run(words: list[str], stack: Stack) -> str:
    done = subprocess.run(words, cwd=ROOT, env=stack.environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_the_snippets_run(stack: Stack, number: int) -> None:
    assert re.fullmatch(r"\[\[\d\]\]\n", run([sys.executable, "-c", here(blocks("python")[number], stack)], stack))


def test_the_curl_line_and_the_trace_that_follows_it(stack: Stack) -> None:
    (line,) = [block for block in blocks("sh") if block.startswith("curl")]
    answer = run(["sh", "-c", here(line, stack)], stack)
    assert answer.startswith("HTTP/1.1 200") and '"label":7' in answer
    request_id = re.search(r"x-request-id: (\S+)", answer)
    assert request_id is not None
    (trace,) = [block for block in blocks("sh") if "oriel trace" in block]
    words = trace.split()
    assert words[:2] == [".venv/bin/oriel", "trace"] and words[2] == "THE-X-REQUEST-ID"
    shown = stack.oriel("trace", request_id[1])
    assert shown.returncode == 0 and "inference.compute" in shown.stdout


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"^make (\w+)", "\n".join(blocks("sh")), re.MULTILINE):
        assert f"\n{command}:" in makefile
