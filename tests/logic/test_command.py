"""`oriel logic` as processes: start, one answer, the ways to stop."""

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from oriel_logic import command
from oriel_wire.errors import StartFailed

from ..waiting import wait_until
from .processes import RUN, LogicServer, importing, linux, until_gone

PLAIN = """
    from oriel_logic import service
    @service
    def plain(request): return request.body[::-1]
    @service
    def endless(request):
        print("endless", flush=True)
        while True: pass
"""


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(flags)


@pytest.fixture
def process(services: Callable[..., Path], tmp_path: Path) -> Iterator[LogicServer]:
    with LogicServer(services(plain=PLAIN), tmp_path / "log") as started:
        yield started


@linux
def test_it_serves_and_stops_when_asked(process: LogicServer) -> None:
    children = process.descendants()
    assert len(children) in (3, 4)  # on a slow machine the keeper has a spare worker as well
    url = httpx.URL(process.url)
    evil = {"host": f"evil.example:{url.port}"}  # of a page in a browser of this machine
    for headers in (evil, {"origin": "https://evil.example", "content-type": "text/plain"}, {"origin": "null"}):
        with httpx.Client(timeout=60) as client:
            for size in (3, 300_000):
                refused = client.post(f"{url}/plain", content=b"x" * size, headers=headers)
                reason = "serves this machine only" if "host" in headers else "serve pages of other sites"
                assert refused.status_code == 400 and reason in refused.text
            assert client.post(f"{url}/plain", content=b"abc").content == b"cba"  # on the same connection
    own = {"origin": f"http://{url.host}:{url.port}"}
    assert httpx.post(f"{url}/plain", content=b"abc", headers=own, timeout=60).content == b"cba"
    assert process.stop() == 0
    until_gone(children)
    assert "Traceback" not in process.log.read_text()


def test_installed_services_and_what_is_saved_later_are_served(
    services: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shipped.py").write_text(
        "from oriel_logic import service\n@service\nasync def ours(request, models, ctx): return 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    folder = services(plain=PLAIN)
    with LogicServer(folder, tmp_path / "log", "--service", "shipped:ours") as process:
        assert httpx.post(f"{process.url}/ours", timeout=60).json() == 7
        (folder / "later.py").write_text("from oriel_logic import service\n@service\ndef f(request): return 8\n")
        wait_until(lambda: httpx.post(f"{process.url}/later", timeout=60).status_code == 200)
        assert process.stop() == 0


@linux
@pytest.mark.parametrize("victim", ["logic", "fork server"])
def test_nobody_is_left_behind_by_a_kill(process: LogicServer, victim: str) -> None:
    url = httpx.URL(process.url)
    with socket.create_connection((url.host, url.port)) as caller:
        caller.sendall(f"POST {url.path}/endless HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n".encode())
        # A caller that left earlier would take a call along that has not begun.
        process.printed("endless")
    children = process.descendants()
    os.kill(process.popen.pid if victim == "logic" else children[0], signal.SIGKILL)
    until_gone(children)
    if victim == "fork server":
        assert httpx.post(f"{process.url}/plain", content=b"abc", timeout=60).content == b"cba"


def test_a_taken_port_is_one_line_with_the_remedy(services: Callable[..., Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ["--services", str(services()), "--http-port", port, "--admin-port", "0"]
        code = f"{RUN}; sys.exit(c.run(p.parse_args(sys.argv[1:])))"
        done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, env=importing())
    assert done.returncode == 2
    assert done.stderr.startswith("oriel logic: ") and done.stderr.count("\n") == 1
    assert port in done.stderr and "--http-port" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--services", "/nowhere/at/all"], "pass --services DIR"),
        ([], "there is nothing to serve: pass --services DIR"),
        (["--service", "nonsense"], "--service: 'nonsense' is not a service: name it as module:attribute"),
        (["--services", ".", "--inference", "nonsense"], "pass --inference HOST:PORT"),
        (["--services", ".", "--inference", "host:99999"], "pass --inference HOST:PORT"),
        (["--services", ".", "--gateway", "nonsense"], "pass --gateway HOST:PORT"),
        (["--services", ".", "--gateway", "a:1", "--inference", "b:1"], "pass one of them"),
        (["--services", ".", "--workers", "0"], "pass --workers N"),
        (
            ["--services", ".", "--worker-environment", "my value"],
            "takes names of environment variables, NAME or BEGIN*",
        ),
    ],
)
def test_wrong_flags_are_one_line_with_the_remedy(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(arguments(*flags)) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "found"), [("a:1", ("a", 1)), ("http://10.0.0.1:8000/", ("10.0.0.1", 8000)), ("[::1]:80", ("::1", 80))]
)
def test_addresses(text: str, found: tuple[str, int]) -> None:
    assert command.address(text) == found
    with pytest.raises(StartFailed):
        command.address("no-port")
