"""Every command and snippet of the README, run as it stands there, with the ports of the test's stack."""

import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from stacks import START_S, STOP_S, Stack, command

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CHAT = ROOT / "tests" / "examples" / "test_chat.py"


def blocks(language: str) -> list[str]:
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return found


def here(text: str, stack: Stack) -> str:
    return text.replace("127.0.0.1:8080", stack.gateway).replace("127.0.0.1:8081", stack.address("gateway", "grpc"))


def run(words: list[str], stack: Stack) -> str:
    done = subprocess.run(
        words, cwd=ROOT, env=stack.environ, capture_output=True, text=True, timeout=START_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


(TRITON,) = [block for block in blocks("python") if "tritonclient" in block]
(OPENAI,) = [block for block in blocks("python") if "openai" in block]
(SERVICE,) = [block for block in blocks("python") if block.startswith("# ")]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_triton_snippet_runs_over_both_protocols(stack: Stack, protocol: str) -> None:
    snippet = TRITON
    if protocol == "grpc":
        assert "`tritonclient.grpc` and port 8081" in README
        snippet = snippet.replace("tritonclient.http", "tritonclient.grpc").replace(":8080", ":8081")
    assert re.fullmatch(r"\[\[\d\]\]\n", run([sys.executable, "-c", here(snippet, stack)], stack))


def test_every_snippet_is_run_here_or_with_the_demo_of_a_chat() -> None:
    assert "make run DEMO=chat" in README and "test_the_printed_commands_and_the_readme" in CHAT.read_text()
    assert sorted(blocks("python")) == sorted([TRITON, OPENAI, SERVICE])


def test_what_the_clients_need_is_named_and_is_what_they_are_tested_with() -> None:
    (line,) = [block for block in blocks("sh") if "pip install" in block and "tritonclient" in block]
    wanted = [Requirement(word.strip('"')) for word in line.split()[2:]]
    assert {each.name for each in wanted} == {"tritonclient", "openai"}
    assert wanted[0].extras == {"http", "grpc"} and all(version(each.name) for each in wanted)


def test_ones_own_service_answers_as_shown(tmp_path: Path) -> None:
    name = SERVICE.partition("\n")[0].removeprefix("# ")
    assert len([line for line in SERVICE.splitlines()[1:] if line]) <= 10
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(SERVICE)
    (dev,) = [block.split() for block in blocks("sh") if "logic dev" in block]
    assert dev[0] == ".venv/bin/oriel"
    words = [*command(*dev[1:]), "--http-port", "0"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            first = server.stdout.readline()
            address = re.search(r"http://([\d.]+:\d+)/v1/services/shout", first)
            assert address is not None, first
            port = dev[dev.index("--http-port") + 1]
            assert port != "8090", "which a running `make run` has"
            (line,) = [block for block in blocks("sh") if f"{port}/v1/services/shout" in block]
            asked = line.replace(f"127.0.0.1:{port}", address[1]).replace("curl ", "curl -s ")
            answer = subprocess.run(["sh", "-c", asked], capture_output=True, text=True, timeout=START_S, check=True)
            assert f"It answers `{answer.stdout.strip()}`" in README
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(STOP_S)
            finally:
                server.kill()


def test_the_curl_line_and_the_trace_that_follows_it(stack: Stack) -> None:
    (line,) = [block for block in blocks("sh") if block.startswith("curl -i")]
    answer = run(["sh", "-c", here(line, stack)], stack)
    assert answer.startswith("HTTP/1.1 200") and '"label":7' in answer
    request_id = re.search(r"x-request-id: (\S+)", answer)
    assert request_id is not None
    (trace,) = [block for block in blocks("sh") if "oriel trace" in block]
    words = trace.split()
    assert words[:2] == [".venv/bin/oriel", "trace"] and words[2] == "THE-X-REQUEST-ID"
    shown = stack.oriel("trace", request_id[1])
    assert shown.returncode == 0 and " compute" in shown.stdout


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(blocks("sh")), re.MULTILINE):
        assert f"\n{target}:" in makefile
