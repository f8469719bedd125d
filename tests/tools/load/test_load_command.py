"""The command `oriel load`; where it sends, in a process of its own, against a server in this one."""

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from oriel_cli.main import main
from oriel_wire.engine.buffered import Exchange, serve
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.process.process import listen
from oriel_wire.v2.http import decode_request, parse_header_length

METADATA = (
    b'{"name": "m", "platform": "p", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}], "outputs": []}'
)


class Server:
    def __init__(self) -> None:
        self.port = 0
        self.posts: list[Exchange] = []

    def __call__(self, exchange: Exchange) -> None:
        if exchange.head.method == "GET":
            exchange.respond(200, [], METADATA)
        else:
            self.posts.append(exchange)
            exchange.respond(200, [], b"{}")


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    found = Server()
    running = await serve(found, listen("127.0.0.1", 0, "x"), limits=HttpLimits())
    found.port = running.port
    yield found
    await running.drain(1)


async def oriel_load(folder: Path, *words: str, interrupt: bool = False) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "oriel_cli.main", "load", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
    )
    if interrupt:
        assert process.stderr is not None
        await process.stderr.readline()  # the first line of progress: it is sending
        process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


class Page(HTMLParser):
    """Every tag is closed, and nothing is fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)
        assert tag not in ("link", "img", "iframe") and not {"src", "href"} & {name for name, _ in attrs}

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


async def test_a_load_prints_a_table_and_leaves_a_plot_and_figures(server: Server, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(f"""
title = "<calm> & storm"
[[stream]]
name = "gold"
url = "http://127.0.0.1:{server.port}/v2/models/m/infer"
rows = 2
encoding = "binary"
target_ms = 1000
[[stream]]
name = "other"
url = "http://127.0.0.1:{server.port}/x"
[[phase]]
name = "calm"
seconds = 0.4
rates = {{ gold = 300, other = 20 }}
[[phase]]
name = "storm"
seconds = 0.8
arrivals = "bursty"
rate = 200
""")
    code, out, err = await oriel_load(tmp_path, "s.toml", "--json", "f.json", "--record", "calls.csv")
    assert code in (0, 1), err  # 1: this machine was too busy for the generator
    assert "calm: poisson arrivals, 0.4 s" in out and "storm: bursty" in out and "goodput/s" in out
    document = json.loads((tmp_path / "f.json").read_text())
    assert [phase["phase"] for phase in document["phases"]] == ["calm", "storm"]
    recorded = [line.split(",") for line in (tmp_path / "calls.csv").read_text().splitlines()]
    assert len(recorded) == sum([phase["all"]["scheduled"] for phase in document["phases"]])
    assert {stream for _, stream in recorded} == {"gold", "other"}
    assert document["phases"][0]["tiers"]["gold"]["good"] == document["phases"][0]["tiers"]["gold"]["scheduled"] > 60
    html = (tmp_path / "oriel-load.html").read_text()
    page = Page(html)
    assert html.count('<div class="chart"') == 3 and page.tags.count("script") == 4
    assert "&lt;calm&gt; &amp; storm" in html and not re.search(r"url\(|@import|fetch\(", html)
    first = next(each for each in server.posts if each.head.target != "/x")
    header_length = parse_header_length(first.head.get("inference-header-content-length"))
    request = decode_request("m", "", first.body, header_length)
    assert request.inputs[0].shape == (2, 4), "random rows as the model's metadata asks for"


async def test_figures_for_machines_alone(server: Server, tmp_path: Path) -> None:
    words = ("--url", f"http://127.0.0.1:{server.port}/x", "--rate", "50", "--seconds", "0.2")
    code, out, err = await oriel_load(tmp_path, *words, "--json", "-", "--no-plot", "--quiet")
    assert code in (0, 1) and err == "" and json.loads(out)["phases"][0]["arrivals"] == "poisson"
    assert list(tmp_path.iterdir()) == []


async def test_a_trace_is_replayed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("0.01\n0.02\n0.02\n0.1\n7\n")
    words = ("--url", f"http://127.0.0.1:{server.port}/x", "--trace", "t.csv", "--seconds", "0.2")
    _, out, _ = await oriel_load(tmp_path, *words, "--json", "-", "--no-plot", "--quiet")
    assert json.loads(out)["phases"][0]["all"]["scheduled"] == 4 == len(server.posts)


async def test_ctrl_c_prints_what_there_is(server: Server, tmp_path: Path) -> None:
    words = ("--url", f"http://127.0.0.1:{server.port}/x", "--rate", "50", "--seconds", "30")
    code, out, _ = await oriel_load(tmp_path, *words, interrupt=True)
    assert code == 130 and "interrupted" in out and "(cut short)" in out
    Page((tmp_path / "oriel-load.html").read_text())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--url", "http://127.0.0.1:1/x", "--rate", "1", "--plot", "absent/p.html"), "no such folder"),
        (("--url", "http://127.0.0.1:1/x", "--rate", "1", "--body", "absent.json"), "absent.json: cannot be read"),
        (
            ("--url", "http://127.0.0.1:1/v2/models/m", "--rate", "1", "--rows", "1"),
            "does not describe the inputs of 'm'",
        ),
        (("--url", "http://127.0.0.1:1/x", "--rate", "1", "--rows", "1"), "need a URL of a model"),
        (("--url", "grpc://127.0.0.1:1/x", "--rate", "1"), "neither /v2/models/NAME nor /Service/Method"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_sent(
    tmp_path: Path,
    words: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["load", *words]) == 1
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1
