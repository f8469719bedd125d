"""The bench that holds calls up in each place: its relay, its count, and a small run of it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gateway_bench.causes import PLACES, Found, Relay, hold_up, kept, opened, servers

from ..gateway.stack import Client, upstream
from ..waiting import until

HOLDS_S = (0.15, 0.6, 2.4, 9.6)


@pytest.mark.parametrize("place", ["request", "answer"])
async def test_the_relay_keeps_one_request_or_the_body_of_its_answer(place: str) -> None:
    slept, go_on = list[float](), asyncio.Event()

    async def sleep(seconds: float) -> None:
        if seconds:
            slept.append(seconds)
            await go_on.wait()

    async with upstream() as up:
        relay = Relay(0, up.port, sleep)
        await relay.up()
        assert relay._server is not None
        port = relay._server.sockets[0].getsockname()[1]
        relay.held = b"x-request-id: held"
        setattr(relay, f"{place}_s", 7.0)
        async with Client(port) as client:
            assert (await client.ask("/", b"x", headers="x-request-id: other\r\n")).body == b"ok"
            client.send("/", b"x", headers="x-request-id: held\r\n")
            if place == "answer":
                assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await until(lambda: slept)
            assert len(up.seen) == (2 if place == "answer" else 1)
            go_on.set()
            body = await (client.reader.readexactly(2) if place == "answer" else client.reply())
            assert slept == [7.0] and b"ok" in (body if isinstance(body, bytes) else body.body)
        await relay.close()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)


def decision(cause: str | None, total: float, **places: float) -> dict[str, Any]:
    promise = {"cause": cause, "result": "late" if cause else "met", "places_ms": places}
    return {"promise": promise, "stages_ms": {"total": total}}


def test_ninety_nine_of_a_hundred_causes_have_to_be_right() -> None:
    found = {"queue": Found(), "model": Found()}
    for _ in range(99):
        found["queue"].add(decision("queue", 100.0, queue=99.5, logic=0.5))
        found["model"].add(decision("model", 100.0, model=100.0))
    found["queue"].add(decision("logic", 100.0, queue=10.0, logic=90.0))
    assert kept(found) and found["queue"].named == {"queue": 99, "logic": 1}
    found["model"].add(decision(None, 10.0, model=10.0))
    found["model"].add(decision("logic", 10.0, logic=10.0))
    assert not kept(found)


def test_the_places_of_each_call_have_to_be_its_whole_time() -> None:
    found = Found()
    found.add(decision("queue", 100.0, queue=99.1))
    assert kept({"queue": found})
    found.add(decision("queue", 100.0, queue=102.0))
    assert not kept({"queue": found}) and found.apart == pytest.approx(0.02)


@pytest.mark.long
def test_each_place_is_named_by_the_gateway_of_three_real_servers(tmp_path: Path) -> None:
    """A busy machine holds calls up as well, so that a place may need more time until it is the cause."""

    async def run(ports: tuple[int, int, int, int]) -> None:
        async with opened(*ports, HOLDS_S[0]) as stack:
            for place in PLACES:
                found = Found()
                for delay_s in HOLDS_S:
                    stack.delay_s = delay_s
                    await hold_up(stack, place, f"{place}-{delay_s}", found)
                    if found.named[place]:
                        break
                assert found.named[place] == 1 and found.apart <= 0.01, f"{place}: {found}"

    with servers(tmp_path, HOLDS_S[0]) as ports:
        asyncio.run(run(ports))
