"""The console in a real browser: what it shows and loads, its keys, its token, hostile names, and axe's judgement."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Page, opened
from npm_packages import installed
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oriel_gateway.admin.console.live import STREAM, Live, Source
from oriel_gateway.admin.console.pages import PATHS, OnlyGet, Pages
from oriel_gateway.admin.guard import Guard
from oriel_wire.process.control import ControlLimits, serve_control
from oriel_wire.process.process import listen

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
HOSTILE = '<img src=x onerror="window.pwned=1">\'"&amp;'
TOKEN = "an-operators-token"
LOCK = Path(__file__).with_name("axe") / "package-lock.json"
COUNTS = {"rate": 12.5, "met": 700, "late": 40, "missed": 5, "excused": 1}


def facts(name: str) -> dict[str, Any]:
    """A snapshot in which every name is `name`, with a number where it has to be unique."""
    promise = {
        "attainment": {"5m": 0.98, "1h": 0.9991, "30d": 0.9987},
        "budget_left": 0.42,
        "burn": {"1h": 1.4},
        "causes": {name: 7, "queue": 2},
    }
    tiers = [
        {
            "tier": f"{name}{n}",
            "target_ms": 50.0,
            "token_ms": (60.0, None, None)[n],
            "objective": 0.99,
            "waiting": n,
            "oldest_ms": 3.0,
            **COUNTS,
            **promise,
        }
        for n in range(3)
    ]
    pools = [
        {
            "pool": f"{name}{n}",
            "permits": 8,
            "inflight": 8,
            "waiting": {f"{name}0": 4, f"{name}1": 9},
            "parked": n,
            "oldest_ms": 812.0,
            "endpoints": {"ready": 3, "unknown": 1, "not_ready": 1, "unreachable": 1, "ejected": 1, name: 1},
            "phase": name,
            "expected_ms": 9000.0,
            "wanted": 3,
            "replicas": 1,
        }
        for n in range(3)
    ]
    targets = [
        {
            "kind": "model",
            "name": f"{name}{n}",
            "pool": name,
            "p50_ms": 4.2,
            "p99_ms": 61.0,
            "rows": 7.5,
            "provider": name,
            "artefact": name,
            "version": name,
            **COUNTS,
        }
        for n in range(3)
    ]
    tenants = [{"tenant": f"{name}{n}", "tier": f"{name}0", "refused": n, "used": 0.4, **COUNTS} for n in range(3)]
    calls = [
        {
            "id": f"{name}{n}",
            "trace": f"{n}" * 32,
            "at": 1.7e9,
            "tenant": f"{name}0",
            "tier": f"{name}0",
            "target": f"model:{name}",
            "result": "late" if n else "refused",
            "reason": name,
            "cause": name,
            "status": 200,
            "took_ms": 81.0 + n,
            "target_ms": 50.0,
        }
        for n in range(3)
    ]
    rows = {"tiers": tiers, "pools": pools, "targets": targets, "tenants": tenants, "calls": calls}
    head = {
        "at": 1.7e9,
        "version": name,
        "covers_s": 60,
        "rates": COUNTS,
        "lag_ms": 0.3,
        "behind": False,
        "draining": False,
    }
    return {**head, "tenants_known": 3, **rows, "more": dict.fromkeys(rows, 2)}


def decision(name: str, request_id: str) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "trace_id": "1" * 32,
        "trace_url": f"https://traces.example.com/{'1' * 32}",
        "ended_at": 1.7e9,
        "reason": name,
        "status": 200,
        "cause": name,
        "bytes_in": 1,
        "bytes_out": 2,
        "tenant": name,
        "tier": name,
        "stages_ms": {"receive": 0.001, "queue": 40.0, "upstream": 40.0, "total": 80.001},
        "server_timing": "logic;dur=30, logic-pre;dur=10, queue;dur=5, compute;dur=11.5",
        "promise": {"result": "late", "cause": name, "target_ms": 50.0},
        "target": name,
        "route": name,
        "pool": name,
        "spilled": [{"pool": name, "reason": name}],
        "limits": [name],
        "queue": {"ahead_at_arrival": 3},
        "tried": [name],
        "endpoint": name,
        "budget_ms": {"end": -3.0},
        "used": {"device_ms": 11.5, "device_class": name, "cpu_ms": 2.0, "tokens_in": 7, "tokens_out": 5},
        "cost": {name: "0.012345678"},
    }


def tenant(name: str) -> dict[str, Any]:
    limits = [
        {"name": f"{name} 1", "counts": "requests", "limit": 10, "left": 4, "per_s": 2.0, "full_in_s": 3.0},
        {"name": f"{name} 2", "counts": name, "limit": 250.0, "left": 12.5, "period": "month", "full_in_s": 0.0},
    ]
    today = {"device_ms": 90_000.0, "cpu_ms": 0.0, "bytes_out": 5, "tokens_in": 700, "tokens_out": 500}
    steps = [{"stage": name, "text": name, "refused": name}]
    return {
        "tenant": f"{name}0",
        "tier": name,
        "weight": 1.0,
        "scopes": [name],
        "models": [name],
        "services": [name],
        "today": {**today, "cost": {name: "3.141592653"}},
        "limits": limits,
        "steps": steps,
    }


class Facts(Source):
    def __init__(self) -> None:
        self.name = HOSTILE

    def snapshot(self) -> bytes:
        return json.dumps(facts(self.name)).encode()

    async def ask(self) -> None:
        await asyncio.Event().wait()

    def rest(self) -> None:
        pass


@dataclass(slots=True)
class Server:
    """An admin port with the console, in a thread of its own. source: what it shows."""

    token: str | None
    base: str = ""
    source: Facts = field(default_factory=Facts)
    live: Any = None

    async def serve(self, ready: threading.Event, over: threading.Event) -> None:
        self.live = Live(self.source)

        async def call(request: Request) -> Response:
            return JSONResponse({"decisions": [decision(self.source.name, request.path_params["id"])]})

        async def one(_: Request) -> Response:
            return JSONResponse(tenant(self.source.name))

        pages = OnlyGet(Pages(token=self.token is not None))
        routes = [Route(path, pages) for path in PATHS]
        routes += [
            Route(STREAM, OnlyGet(self.live)),
            Route("/decisions/{id:path}", call),
            Route("/console/tenants/{name:path}", one),
        ]
        sock, stop = listen("127.0.0.1", 0, "console"), asyncio.Event()
        self.base = f"http://127.0.0.1:{sock.getsockname()[1]}"
        limits = ControlLimits(streams=frozenset({STREAM}))
        serving = asyncio.create_task(
            serve_control(Guard(Starlette(routes=routes), self.token), sock, stop, limits=limits)
        )
        ready.set()
        await asyncio.to_thread(over.wait)
        self.live.close()
        stop.set()
        await serving


@contextlib.contextmanager
def served(token: str | None = None) -> Iterator[Server]:
    server, ready, over = Server(token), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(ready, over)))
    thread.start()
    try:
        assert ready.wait(60)
        yield server
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with opened(tmp_path_factory.mktemp("profile")) as tab:
        tab.tell("Emulation.setDeviceMetricsOverride", width=1440, height=900, deviceScaleFactor=1, mobile=False)
        yield tab


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served() as one:
        yield one


@pytest.fixture
def console(page: Page, server: Server) -> Page:
    """The first screen, with the data there."""
    server.source.name = "name"
    page.open("about:blank#")
    page.tell("Page.navigate", url=f"{server.base}/console")
    # The first snapshot may be the last one of the test before.
    page.wait("document.querySelector('[data-key=\"tiers/name0\"]')")
    page.wait("document.querySelector('.area-calls tbody tr[data-key]')")
    return page


def press(page: Page, key: str) -> None:
    text = key if len(key) == 1 else ""
    page.tell("Input.dispatchKeyEvent", type="keyDown", key=key, text="\r" if key == "Enter" else text)
    page.tell("Input.dispatchKeyEvent", type="keyUp", key=key)


def focused(page: Page) -> str:
    return str(
        page.run("document.activeElement.dataset.key || document.activeElement.id || document.activeElement.localName")
    )


def test_the_first_screen_takes_four_requests_and_shows_every_part(console: Page, server: Server) -> None:
    own = [url.removeprefix(server.base) for url in console.requested if url.startswith(server.base)]
    assert sorted(own) == ["/console", "/console/console.css", "/console/console.js", "/console/live"]
    headings = console.run("[...document.querySelectorAll('main h2')].map(each => each.firstChild.textContent.trim())")
    tables = ["Tiers", "Pools", "Models and services", "Tenants", "Latest misses and refusals"]
    assert [each for each in headings if each in tables] == tables
    console.tell("Emulation.setDeviceMetricsOverride", width=1920, height=900, deviceScaleFactor=1, mobile=False)
    gold = console.run("document.querySelector('.area-tiers tbody tr').innerText")
    console.tell("Emulation.setDeviceMetricsOverride", width=1440, height=900, deviceScaleFactor=1, mobile=False)
    for text in ("99.91", "98.00", "99.87", "42", "1.40", "name 78 %", "50ms", "60ms"):
        assert text in gold
    assert console.run("document.querySelector('.area-pools .dots').getAttribute('aria-label')").startswith(
        "3 ready, 1 not probed"
    )
    heights = console.run("[...document.querySelectorAll('main tbody tr')].map(each => each.offsetHeight)")
    assert set(heights) <= {24, 25}, "rows are compact"
    columns = console.run("[...document.querySelectorAll('.area-targets th')].map(each => each.textContent.trim())")
    assert "artefact" in columns, "a model asks for one"


def test_a_name_is_text_wherever_it_stands(console: Page, server: Server) -> None:
    server.source.name = HOSTILE
    console.wait("document.querySelector('.area-tiers tbody').textContent.includes('onerror')")
    for row, seen in (("calls", ".waterfall"), ("tenants", "#explain")):
        console.run(f"document.querySelector('.area-{row} tbody tr').click()")
        console.wait(f"document.querySelector('{seen}')")
        assert "onerror" in console.run("document.querySelector('#details').textContent")
        assert console.run("document.querySelectorAll('img, iframe, object, svg script, [onerror]').length") == 0
    assert console.run("typeof window.pwned") == "undefined"


def test_the_trace_of_a_late_call_is_two_clicks_away(console: Page) -> None:
    console.run("document.querySelector('.area-calls tbody tr:nth-child(2)').click()")
    link = console.wait("document.querySelector('#details a.link')?.href")
    assert link == f"https://traces.example.com/{'1' * 32}"
    spans = console.run(
        "[...document.querySelectorAll('.span')].map(each => [each.querySelector('.label').textContent, "
        "each.querySelector('.track i:last-child').offsetWidth])"
    )
    assert [name for name, _ in spans] == [
        "receive body",
        "queue",
        "upstream",
        "logic",
        "pre",
        "model queue",
        "model compute",
    ]
    assert all(width >= 2 for _, width in spans), "a short span can be seen"
    line = console.run("document.querySelector('.line').innerText")
    assert [each.strip() for each in line.split("·")] == ["80 ms total", "name", "12 ms of name", "0.0123 name"]


def test_a_tenant_shows_its_use_its_cost_and_its_limits_which_sort(console: Page) -> None:
    console.run("document.querySelector('.area-tenants tbody tr').click()")
    facts = console.wait("document.querySelector('#details dl')?.innerText")
    assert "90.0 s of devices, 1,200 tokens" in facts and "3.14 name" in facts
    limits = "[...document.querySelectorAll('.area-limits tbody tr')].map(each => each.innerText)"
    first, second = console.run(limits)
    assert "4 / 10" in first and "2 per s" in first and "12.5" in second and "/ 250 name" in second
    console.run("document.querySelectorAll('.area-limits thead button')[1].click()")
    assert console.run(limits) == [first, second] and "sort.limits=-left" in console.run("location.hash")
    console.run("document.querySelectorAll('.area-limits thead button')[1].click()")
    assert console.run(limits) == [second, first]
    console.run("document.querySelector('#explain').value = 'model:name0'")
    console.run("document.querySelector('#explain').dispatchEvent(new Event('change', {bubbles: true}))")
    assert "of=model%3Aname0" in console.run("location.hash")


def test_everything_can_be_reached_with_keys(console: Page, server: Server) -> None:
    press(console, "j")
    assert focused(console) == "tiers/name0"
    press(console, "j")
    press(console, "k")
    assert focused(console) == "tiers/name0"
    press(console, "/")
    assert focused(console) == "search"
    for letter in "late":
        press(console, letter)
    console.wait("document.querySelectorAll('.area-calls tbody tr[data-key]').length === 2")
    assert console.run("location.hash") == "#q=late"
    press(console, "Escape")
    console.wait("document.querySelectorAll('.area-calls tbody tr[data-key]').length === 3")
    press(console, "?")
    console.wait("document.querySelector('#help')")
    press(console, "Escape")
    console.wait("!document.querySelector('#help')")
    console.run("document.querySelector('.area-calls tbody tr').focus()")
    press(console, "Enter")
    console.wait("document.querySelector('.waterfall')")
    assert focused(console) == "details"
    press(console, "Escape")
    console.wait("!document.querySelector('#details')")
    assert focused(console).startswith("calls/"), "the row that was opened has the focus again"
    press(console, "p")
    console.wait("document.querySelector('.link-state').textContent.includes('paused')")
    while server.live.viewers:
        console.run("new Promise(done => setTimeout(done, 10))")
    press(console, "p")
    console.wait("document.querySelector('.link-state').textContent.includes('live')")


def test_order_and_theme_are_in_the_address_and_come_back(console: Page, server: Server) -> None:
    console.run("document.querySelectorAll('.area-calls thead button')[7].click()")
    assert console.run("document.querySelector('.area-calls th[aria-sort=descending]').textContent").startswith("took")
    assert console.run("document.querySelector('.area-calls tbody tr').dataset.key") == f"calls/name2 {'2' * 32}"
    console.run("[...document.querySelectorAll('.tools button')][1].click()")
    fragment = console.run("location.hash")
    assert "sort.calls=-took" in fragment and "theme=" in fragment
    console.open("about:blank#")
    console.tell("Page.navigate", url=f"{server.base}/console{fragment}")
    console.wait("document.querySelector('.area-calls th[aria-sort=descending]')")
    assert console.run("document.documentElement.dataset.theme") in ("light", "dark")


def enter(page: Page, token: str) -> None:
    page.run(f"document.querySelector('#token').value = '{token}'")
    page.run("document.querySelector('form').requestSubmit()")


def test_a_token_is_typed_and_kept_in_memory_only(page: Page, server: Server) -> None:
    with served(TOKEN) as guarded:
        page.tell("Page.navigate", url=f"{guarded.base}/console")
        page.wait("document.querySelector('#token')")
        before = len(page.complaints)
        enter(page, "wrong-token-of-somebody")
        page.wait("document.querySelector('.link-state').textContent.includes('does not accept')")
        assert all("401" in each for each in page.complaints[before:])
        del page.complaints[before:]
        enter(page, TOKEN)
        page.wait("document.querySelector('.area-calls tbody tr[data-key]')")
        stores = "document.cookie, {...localStorage}, {...sessionStorage}"
        kept = page.run(f"JSON.stringify([location.href, {stores}, document.body.innerHTML])")
        assert TOKEN not in kept and not [url for url in page.requested if TOKEN in url]


AXE = (
    "axe.run().then(({violations}) => violations.map(each => [each.id, each.nodes.slice(0, 3).map(node => node.html)]))"
)


def test_axe_finds_nothing(console: Page) -> None:
    console.run((installed(LOCK) / "axe-core/axe.min.js").read_text() + ";1")
    for theme, row, seen in (("light", "calls", ".waterfall"), ("dark", "tenants", "#explain")):
        console.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        console.run(f"document.querySelector('.area-{row} tbody tr').click()")
        console.wait(f"document.querySelector('{seen}')")
        assert console.run(AXE) == [], theme
    press(console, "Escape")
    press(console, "?")
    assert console.run(AXE) == []
    press(console, "Escape")


# The charts are drawn again in the frame after a change of the width.
DRAWN = (
    "[...document.querySelectorAll('.chart .uplot')].every(each => each.offsetWidth === each.parentNode.clientWidth)"
)
# Elements that end to the right of the screen, without those of tables that are cut at their cells.
WIDER = """[...document.querySelectorAll('#root *')].filter(each => each.getBoundingClientRect().right > %d + 0.5
  && !each.closest('td.grow, .hidden')).map(each => `${each.localName}.${each.className} ${each.innerText}`)"""


@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_is_wider_than_the_screen(console: Page, width: int) -> None:
    console.tell("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
    console.wait(DRAWN)
    assert console.run(WIDER % width) == []
    console.run("document.querySelector('.area-calls tbody tr').click()")
    console.wait("document.querySelector('.waterfall')")
    console.wait(DRAWN)
    assert console.run(WIDER % width) == []
    press(console, "Escape")
    console.wait("!document.querySelector('#details')")
    console.run("document.querySelector('.area-tenants tbody tr').click()")
    console.wait("document.querySelector('.area-limits')")
    console.wait(DRAWN)
    assert console.run(WIDER % width) == []


def test_a_narrow_screen_says_why_a_call_was_refused_and_whose_it_was(console: Page) -> None:
    console.tell("Emulation.setDeviceMetricsOverride", width=390, height=900, deviceScaleFactor=1, mobile=True)
    console.wait(DRAWN)
    shown = "[...document.querySelectorAll('.area-calls th[scope=col]')].filter(each => each.offsetWidth)"
    named = f"{shown}.map(each => each.innerText.trim())"
    assert console.run(named) == ["time", "result", "reason", "tenant", "took"]


def test_nothing_came_from_elsewhere_and_nothing_was_objected_to(page: Page) -> None:
    asked = [url for url in page.requested if not url.startswith(("http://127.0.0.1:", "data:", "about:"))]
    assert page.requested and asked == [] and page.complaints == []
