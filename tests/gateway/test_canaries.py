"""Canaries that are rolled back: which calls count, that they stay so, and where the reason is shown."""

import json
import logging
from dataclasses import field, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from oriel_gateway.admin.console.live import Source
from oriel_gateway.shared.canaries import Canaries, RolledBack, _digest, _text, folder_name
from oriel_policies.documents import Route, compile_documents
from oriel_policies.quality.canary import Rollback
from oriel_wire.objects.client import location_of

from ..waiting import until
from .first_forms import CANARY, CANARY_NAME
from .special_routes import INFER, House, answering, house, metric, ok
from .stack import Client

SPLIT = """
[[routes]]
name = "d"
model = "*"
split = [{ pool = "p0", weight = 50 }, { pool = "p1", weight = 50 }]
split_by = "request"
"""
JUDGED = SPLIT + 'rollback = { canary = "p1", min_calls = 20, compare_percent = 0.0 }\n'
NAME = folder_name(Path("policies"))
BROKEN = ok(b"{}", status="500 Broken")
WRONG = ok(b"{}", status="400 Wrong")


async def calls(it: House, count: int) -> None:
    async with Client(it.port) as client:
        for number in range(count):
            await client.ask(INFER, b"x", headers=f"x-request-id: r{number}\r\n")


def rolled_back(it: House) -> dict[tuple[str, ...], float]:
    return metric(it.core, "oriel_gateway_canary_rolled_back")


async def test_a_canary_that_fails_gets_no_more_calls_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async with house(JUDGED) as it:
        it.ups[1].answer = answering(BROKEN)
        with caplog.at_level(logging.ERROR):
            await calls(it, 100)
        assert rolled_back(it) == {("d", "p1", "errors"): 1.0}
        assert "route d: canary p1 is rolled back (errors): " in caplog.text
        before = len(it.ups[1].seen)
        assert before < 60
        await calls(it, 50)  # the same ids, half of which had gone to the canary
        assert len(it.ups[1].seen) == before


async def test_a_good_canary_stays_and_so_does_one_whose_callers_are_to_blame() -> None:
    for wrong in (ok(), WRONG):
        async with house(JUDGED) as it:
            it.ups[1].answer = answering(wrong)
            await calls(it, 100)
            assert rolled_back(it) == {} and len(it.ups[1].seen) > 30


async def test_a_canary_on_a_recognised_connection_is_left_at_once() -> None:
    by_tenant = JUDGED.replace('split_by = "request"', 'split_by = "header:x-user"')
    async with house(by_tenant) as it, Client(it.port) as client:
        it.ups[1].answer = answering(BROKEN)
        for number in range(100):
            await client.ask(INFER, b"x", headers=f"x-user: u{number % 10}\r\n")
        before = len(it.ups[1].seen)
        assert rolled_back(it) and 20 <= before < 90
        for number in range(10):
            assert (await client.ask(INFER, b"x", headers=f"x-user: u{number}\r\n")).status == 200
        assert len(it.ups[1].seen) == before


async def test_it_stays_rolled_back_until_its_route_changes() -> None:
    async with house(JUDGED) as it:
        it.ups[1].answer = answering(BROKEN)
        await calls(it, 100)
        it.ups[1].answer = answering(ok())
        before, snapshot = len(it.ups[1].seen), it.core.snapshot
        it.core.adopt(same(snapshot, {}))
        await calls(it, 50)
        assert len(it.ups[1].seen) == before and rolled_back(it), "other routes may have changed"
        it.core.adopt(same(snapshot, {"name": "e"}))
        await calls(it, 50)
        assert len(it.ups[1].seen) > before + 10 and rolled_back(it) == {}
        it.core.adopt(same(snapshot, {}))
        assert rolled_back(it) == {}, "it was changed, and changed back: that is a new try"


def same(snapshot: Any, changes: dict[str, Any]) -> Any:
    """Return other documents with equal routes, or with changed ones."""
    routes = tuple(replace(route, **changes) for route in snapshot.routes)
    return replace(snapshot, routes=routes, served={})


async def test_a_restart_does_not_give_it_calls_again(tmp_path: Path) -> None:
    path = tmp_path / "state" / NAME
    async with house(JUDGED) as it:
        it.core.routing.canaries.open(path)
        it.ups[1].answer = answering(BROKEN)
        await calls(it, 100)
        await until(lambda: any(path.glob("*.json")))
    async with house(JUDGED) as it:
        it.core.routing.canaries.open(path)
        it.core.apply_rollbacks()
        await calls(it, 50)
        assert not it.ups[1].seen and rolled_back(it) == {("d", "p1", "errors"): 1.0}


def test_gateways_that_share_a_folder_keep_what_the_others_wrote(tmp_path: Path) -> None:
    folder, one, other = tmp_path / "state" / NAME, Canaries(), Canaries()

    def roll_back(canaries: Canaries, digest: str) -> None:
        canaries.rolled_back[digest] = RolledBack(route="r", side="s", reason="errors", text="", at=1.0)
        canaries._write(folder, digest)

    roll_back(one, "0")
    roll_back(other, "1")
    del one.rolled_back["0"]  # its route has changed
    one._write(folder, "0")
    roll_back(other, "2")
    again = Canaries()
    again.open(folder)
    assert again.rolled_back == other.rolled_back


def test_gateways_with_other_documents_keep_a_file_of_their_own() -> None:
    """The routes of one are not among those of the other, which would forget what was rolled back."""
    stored = [location_of(f"s3://bucket/{each}") for each in ("a/", "b/")]
    assert len({folder_name(each) for each in (Path("a"), Path("b"), *stored)}) == 4
    assert folder_name(Path("a")) == folder_name(Path("a").absolute())


def route() -> Route:
    text = """
[tiers.gold]
band = 0
target_ms = 200
[pools.p0]
endpoints = ["10.0.0.1:8000"]
[pools.p1]
endpoints = ["10.0.0.2:8000"]
"""
    (found,) = compile_documents({"all.toml": (text + JUDGED).encode()}).routes
    return found


@pytest.mark.parametrize("text", ["", "[]", '{"route": "d"}', "\xff"])
def test_a_damaged_file_is_reported_and_forgotten(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
    canaries = Canaries()
    canaries.open(tmp_path)
    assert canaries.rolled_back == {} and "cannot be read" in caplog.text


def test_without_a_folder_there_is_nothing_to_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Canaries().open(tmp_path / NAME)
    assert caplog.text == ""


def test_the_routes_in_force_are_without_what_was_rolled_back(tmp_path: Path) -> None:
    first, again = route(), route()
    assert first.rollback == Rollback(canary="p1", min_calls=20, compare_share=0.0)
    canaries = Canaries()
    assert canaries.adopt([first]) == [first]
    digest = canaries._digests[first]
    entry = {"route": "d", "side": "p1", "reason": "errors", "text": "why", "at": 1.0}
    (tmp_path / f"{digest}.json").write_text(json.dumps(entry))
    canaries.open(tmp_path)
    (found,) = canaries.adopt([again])
    assert found.pool == "p0" and [side.name for side in found.split] == ["p0"] and found.split[0].until == 1.0
    assert [each.reason for each in canaries.shown()] == ["errors"]


async def test_the_snapshot_of_the_console_names_what_was_rolled_back() -> None:
    async with house(JUDGED) as it:
        it.ups[1].answer = answering(BROKEN)
        await calls(it, 100)
        assert json.loads(Source(it.core).snapshot())["rolled_back"] == ["d: p1 (errors)"]


def test_a_canary_stays_rolled_back_when_routes_get_more_fields(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert _digest(route()) == CANARY_NAME
    later: Any = make_dataclass("Route", [("added", str, field(default=""))], bases=(Route,), frozen=True, kw_only=True)
    values = {name: getattr(route(), name) for name in Route.__dataclass_fields__}
    assert _text(later(**values)) == _text(route()) != _text(later(**values, added="x"))
    assert _text(replace(route(), sticky="x-user")) != _text(route())
    (tmp_path / f"{CANARY_NAME}.json").write_text(CANARY)
    (tmp_path / "later.json").write_text(CANARY.replace('"form":1', '"form":2'))
    canaries = Canaries()
    canaries.open(tmp_path)
    assert canaries.rolled_back.keys() == {CANARY_NAME}
    assert "later.json cannot be read" in caplog.text and "of form 2, of a later version" in caplog.text
    (found,) = canaries.adopt([route()])
    assert [side.name for side in found.split] == ["p0"] and (tmp_path / "later.json").exists()
