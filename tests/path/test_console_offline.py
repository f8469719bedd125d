"""The console of a whole platform in a browser that reaches nothing but this machine."""

import asyncio
from pathlib import Path

import pytest
from browser import CHROMIUM, opened

from oriel_gateway.admin.app import admin_app
from oriel_gateway.admin.console.live import STREAM, Live, Source
from oriel_wire.process.control import ControlLimits, serve_control
from oriel_wire.process.process import listen

from ..gateway.stack import Client
from .units import digest, path

# Every name and every address but loopback is unknown to the browser.
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
DOCUMENTS = f"""
[tiers.gold]
band = 0
target_ms = 1
give_up_ms = 60000
[[routes]]
service = "*"
pool = "logic"
[tenants.acme]
tier = "gold"
services = ["*"]
keys = [{{ sha256 = "{digest("key-acme")}" }}]
"""
SERVICE = """
import numpy as np
from oriel_logic import Request, service

@service
async def twice(request: Request, models, ctx) -> dict:
    with ctx.stage("decode"):
        row = np.zeros((1, 4), np.float32)
    return {"sum": float((await models.infer("double", {"x": row}))["y"].sum())}
"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
async def test_the_trace_of_a_late_call_is_two_clicks_from_the_first_screen(tmp_path: Path) -> None:
    """The stages of all three units are there, with no trace store and no network."""
    async with path(tmp_path, DOCUMENTS, {"twice": SERVICE}) as it:
        it.fake.gate.open()
        async with Client(it.http) as client:
            assert (await client.ask("/v1/services/twice", b"{}", key="key-acme")).status == 200
        live, stop, sock = Live(Source(it.gateway)), asyncio.Event(), listen("127.0.0.1", 0, "console")
        base = f"http://127.0.0.1:{sock.getsockname()[1]}"
        app = admin_app(it.gateway, live=live, trace_url="https://traces.example.com/{trace_id}")
        serving = asyncio.create_task(serve_control(app, sock, stop, limits=ControlLimits(streams=frozenset({STREAM}))))

        def look() -> None:
            with opened(tmp_path / "profile", OFFLINE) as page:
                page.tell(
                    "Emulation.setDeviceMetricsOverride", width=1440, height=900, deviceScaleFactor=1, mobile=False
                )
                page.open(f"{base}/console")
                page.click(".area-calls tbody tr[data-key] .name")  # the first click
                shown = page.wait("document.querySelector('.waterfall')?.innerText").split("\n")
                for stage in ("receive body", "queue", "upstream", "logic", "decode", "model queue", "model compute"):
                    assert stage in shown
                assert "total" in page.run("document.querySelector('.line').innerText")
                # The second click, for those who have a store of traces.
                link = page.run("document.querySelector('#details a.link').href")
                assert link == "https://traces.example.com/" + it.gateway.records.decisions.latest(1)[0].mark.trace
                assert all(url.startswith((base, "about:", "data:")) for url in page.requested)
                assert not page.complaints

        try:
            await asyncio.to_thread(look)
        finally:
            live.close()
            stop.set()
            await serving
