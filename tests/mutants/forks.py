"""Run pytest in forks of a process that has imported the libraries: starting it anew costs more than most tests.

Reads one JSON object per line, {"tests": [...], "most_s": 180}, and answers each with pytest's exit status, or with -1
where the time ran out. `run.py` starts it in a copy of the checkout; none of the product's modules is imported before
the fork, so that each fork sees its own change. With arguments it runs pytest once, with them and the same settings.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import sys

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase

LIBRARIES = (
    "cryptography.x509",
    "grpc.aio",
    "hiredis",
    "httpx",
    "hypothesis.strategies",
    "msgspec",
    "numpy",
    "onnx",
    "onnxruntime",
    "opentelemetry.sdk.trace",
    "prometheus_client",
    "redis.asyncio",
    "starlette.applications",
    "tritonclient.grpc",
    "tritonclient.http",
    "uvicorn",
    "uvloop",
)
PYTEST = [
    "-q",
    "-n0",
    "--tb=no",
    "--no-header",
    "-p",
    "no:cacheprovider",
    "--hypothesis-seed=1",
    "--hypothesis-profile=mutants",
    "--timeout=60",
    "-Wignore::pytest.PytestAssertRewriteWarning",
]


def status(tests: list[str], most_s: float) -> int:
    """Run the tests in a fork; return pytest's exit status, or -1 after `most_s` seconds."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # not a new session: it keeps its share of the processor
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        code = 3
        with contextlib.suppress(BaseException):
            code = int(pytest.main([*PYTEST, "-x", *tests]))
        os._exit(code)
    ended = os.pidfd_open(child)
    in_time = bool(select.select([ended], [], [], most_s)[0])
    os.close(ended)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests have started as well
    _, left = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(left) if in_time else -1


def main() -> None:
    # A found example is neither made smaller nor kept: another change must not be noticed by means of it.
    hypothesis.settings.register_profile(
        "mutants",
        deadline=None,
        database=None,
        max_examples=40,
        suppress_health_check=[HealthCheck.too_slow],
        phases=[Phase.explicit, Phase.generate],
    )
    if sys.argv[1:]:
        sys.exit(pytest.main([*PYTEST, *sys.argv[1:]]))
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.path.insert(0, os.getcwd())
    for line in sys.stdin:
        asked = json.loads(line)
        print(status(asked["tests"], asked["most_s"]), flush=True)


if __name__ == "__main__":
    main()
