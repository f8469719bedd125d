"""Set-up of all tests: the uvloop event loop, and how tests are spread over processes."""

import ast
import fcntl
import gc
import json
import os
import ssl
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import cache, wraps
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import uvloop

from oriel_wire.engine import listener
from oriel_wire.process import start

from .warm import Starter

ROOT = Path(__file__).resolve().parents[1]

# What was compiled is kept for the other test processes and for what they start, even where the environment says
# otherwise, as in images of containers: compiling the tests alone takes a process 15 s.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Collecting the tests makes a million objects that stay: nothing is looked for among them until all are there.
gc.disable()

# grpcio's fork handlers crash a child of uvloop's fork, before its exec, about once in 3,000 forks while gRPC is busy.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    pass  # in the environment of `make test SUITE=openvino`, which has no properties
else:
    # A machine that is busy with something else is no failure: nothing here asserts how long a property takes.
    settings.register_profile("oriel", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("oriel")


def _uncollected(parse: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(parse)
    def parsing(*words: Any, **more: Any) -> Any:
        collects = gc.isenabled()
        gc.disable()
        try:
            return parse(*words, **more)
        finally:
            if collects:
                gc.enable()

    return parsing


# CPython 3.11's parser raises SystemError if it is entered again meanwhile (gh-106905, 3.12 is well): a collection in
# the middle of it ends some task of an earlier test; its log entry has a traceback, and formatting one parses as well.
ast.parse = _uncollected(ast.parse)


class _Loop(uvloop.Loop):
    def close(self) -> None:
        """Close the loop; what a failed test has left open is only warned about.

        As an error, the warning would be raised inside uvloop while it closes handles, and uvloop would wait for ever.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("always", ResourceWarning)
            super().close()


def pytest_asyncio_loop_factories(config: Any, item: Any) -> Mapping[str, Callable[[], uvloop.Loop]]:
    """Run tests on uvloop as the units do, because its transports differ from asyncio's."""
    return {"uvloop": _Loop}


def compiled_modules() -> list[str]:
    """Return the dotted names of the modules that a compiled wheel compiles, as pyproject.toml lists them."""
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]
    return [path.partition("/")[2].removesuffix(".py").replace("/", ".") for path in hook["custom"]["modules"]]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Check for `make test SUITE=compiled` that nothing of ours comes from the checkout, and that it is compiled."""
    if os.environ.get("ORIEL_TEST_COMPILED") != "1":
        return
    for name in ("oriel_cli", "oriel_gateway", "oriel_inference", "oriel_logic", *compiled_modules()):
        found = find_spec(name)
        file = "" if found is None else found.origin or ""
        library = file.endswith(tuple(EXTENSION_SUFFIXES))
        if not file or "site-packages" not in file or library != (name in compiled_modules()):
            pytest.exit(f"{name} is {file or 'missing'}, and not what the compiled wheel has of it", returncode=2)


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what servers record out of the home folder, and apart from what other test processes record."""
    os.environ["ORIEL_STATE"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session", autouse=True)
def warm_children() -> Iterator[Starter | None]:
    """Fork the child processes of servers in this process from processes that have imported what they need."""
    if not hasattr(os, "pidfd_open"):
        yield None
        return
    starter = Starter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "subprocess", starter)
        yield starter
    starter.close()


@pytest.fixture
def cold_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start child processes as servers do: for tests about the start itself."""
    monkeypatch.setattr(start, "subprocess", subprocess)


@pytest.fixture(scope="session", autouse=True)
def servers_in_process_end_soon() -> Iterator[None]:
    """Let servers in this process close at once when they end; tests about closing set these times themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listener, "LAME_DUCK_S", 0.01)
        patch.setattr(listener, "LINGER_S", 0.01)
        yield


@pytest.fixture(scope="session", autouse=True)
def clients_share_the_certificates() -> Iterator[None]:
    """Share one TLS context between the clients of httpx: reading the authorities' certificates takes 20 ms of CPU, and
    hundreds of tests create a client.
    """
    from httpx._transports import default

    new = default.create_ssl_context
    context: ssl.SSLContext | None = None

    def create(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        nonlocal context
        if verify is not True or cert is not None or trust_env:
            return new(verify=verify, cert=cert, trust_env=trust_env)
        if context is None:
            context = new(trust_env=False)
        return context

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", create)
        yield


class Run:
    """State that the processes of one test run share.

    folder: used by this run only, the same in each process.
    pid: the process that started the others, and ends last.
    """

    def __init__(self, folder: Path, pid: int) -> None:
        self.folder = folder
        self.pid = pid

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returned in the first process that asked for `name`; it has to be JSON.

        The other processes wait for it. If `make` raises, the next process that asks calls it again.
        """
        made = self.folder / f"{name}.json"
        with (self.folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                made.write_text(json.dumps(make()))
        return json.loads(made.read_text())


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The test run that this process belongs to."""
    own = tmp_path_factory.getbasetemp()
    one_of_several = hasattr(request.config, "workerinput")
    folder = (own.parent if one_of_several else own) / "run"
    folder.mkdir(exist_ok=True)
    return Run(folder, os.getppid() if one_of_several else os.getpid())


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Let one process compile a test module while the others wait for what it has compiled.

    Compiling all of them takes 13 s of a core, which each process would spend otherwise in a new checkout.
    """
    if not isinstance(collector, pytest.Module) or not hasattr(collector.config, "workerinput"):
        return (yield)
    with collector.path.open() as module:
        fcntl.flock(module, fcntl.LOCK_EX)
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """Keep tests that share something and rows of one table in one process, and put all others wherever one is free."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return together(nodeid)

        def _reschedule(self, node: Any) -> None:
            """Forget the tests that are done first: xdist counts all that a process was ever given, after each test."""
            given = self.assigned_work[node]
            for scope in [each for each, tests in given.items() if all(tests.values())]:
                del given[scope]
            super()._reschedule(node)

    return Scheduling(config, log)


def together(nodeid: str) -> str:
    """Return the scope of a test: tests with the same scope run in one process, one after the other."""
    file = nodeid.partition("::")[0]
    if file.startswith("tests/path/") and uses_the_stack(file):
        return "tests/path"
    return file if shares(file) else nodeid.partition("[")[0]


@cache
def uses_the_stack(file: str) -> bool:
    """Whether the file's tests share the stack of tests/path/conftest.py, which takes long to start."""
    text = (ROOT / file).read_text()
    return "stack: Stack" in text or "client: httpx.Client" in text


@cache
def shares(file: str) -> bool:
    """Whether the file has a fixture that its tests share."""
    return 'scope="module"' in (ROOT / file).read_text()


def pytest_collection_finish() -> None:
    """Keep the tests themselves, some million objects, out of every collection of garbage."""
    gc.freeze()
    gc.enable()
