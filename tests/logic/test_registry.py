"""Which release of a service gets a request, and how services are described."""

from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from oriel_logic import service
from oriel_logic.errors import ServiceBroken, ServiceUnknown
from oriel_logic.loading.sources import HandlerFile
from oriel_logic.server.registry import Registry
from oriel_logic.server.releases import Deployment, Release
from oriel_logic.services.definition import Definition, definition_of


def definition(name: str) -> Definition:
    @service(name=name)
    def handler(request: Any) -> int:
        """Answers."""
        return 1

    found = definition_of(handler)
    assert found is not None
    return found


def a_file(name: str = "digits", version: str = "1", path: str = "") -> HandlerFile:
    path = path or f"/services/{name}/{version}/handler.py"
    return HandlerFile(
        module=f"oriel_services.{name}_{version}", path=Path(path), folder=Path(path).parent, name=name, version=version
    )


def release(file: HandlerFile, name: str = "") -> Release:
    deployment = Deployment([file], cast(Any, None), cast(Any, None))
    return Release(definition(name or file.name), file, deployment)


def published(registry: Registry, file: HandlerFile, name: str = "") -> Release:
    made = release(file, name)
    registry.publish(file.origin, [made])
    return made


async def test_a_service_is_found_by_name_and_version() -> None:
    registry = Registry()
    one = published(registry, a_file())
    assert registry.find("digits") is registry.find("digits", "1", "any") is one
    with pytest.raises(ServiceUnknown, match="there is no service 'other'"):
        registry.find("other")
    with pytest.raises(ServiceUnknown, match="there is no service 'digist', did you mean 'digits'?"):
        registry.find("digist")
    for patterns, near in (("dig*,x", True), ("x, y", False), ("!", False)):
        with pytest.raises(ServiceUnknown) as error:
            registry.find("digist", patterns=patterns)
        assert ("digits" in error.value.message) is near, "only what the caller may use"
    with pytest.raises(ServiceUnknown, match="has no version '2', it has 1"):
        registry.find("digits", "2")


async def test_the_newest_version_takes_what_names_none_until_weights_say_otherwise() -> None:
    registry = Registry()
    nine, ten = published(registry, a_file(version="9")), published(registry, a_file(version="10"))
    assert registry.find("digits", key="a") is ten
    registry.weigh("digits", {"9": 75, "10": 25, "11": 900})
    found = Counter(registry.find("digits", key=f"request-{number}") for number in range(4000))
    assert set(found) == {nine, ten} and 2700 < found[nine] < 3300, "a version that is not there has no share"
    assert all(registry.find("digits", key="same") is registry.find("digits", key="same") for _ in range(10))
    registry.withdraw(nine.file.origin)
    assert registry.find("digits", key="a") is ten
    registry.weigh("digits", {"11": 1})
    assert registry.find("digits", key="a") is ten, "nobody who has a share is there"
    published(registry, a_file(version="11"))
    assert registry.find("digits", key="a").version == "11"


async def test_what_is_replaced_leaves_and_drains() -> None:
    registry = Registry()
    old = published(registry, a_file())
    old.began()
    new = release(a_file())
    assert registry.publish(new.file.origin, [new]) == [old]
    assert registry.find("digits") is new and (old.number, new.number) == (1, 2)
    assert old.is_leaving and old.in_flight
    old.finished()
    await old.drained.wait()
    assert not old.in_flight and not new.is_leaving


async def test_a_file_that_serves_another_name_now_no_longer_serves_the_old_one() -> None:
    registry = Registry()
    path = "/services/many.py"
    old = [release(a_file("many", path=path), name) for name in ("a", "b")]
    registry.publish(path, old)
    new = [release(a_file("many", path=path), name) for name in ("b", "c")]
    assert registry.publish(path, new) == old
    assert registry.find("b") is new[0] and registry.find("c") is new[1]
    with pytest.raises(ServiceUnknown):
        registry.find("a")


async def test_a_failed_update_is_said_and_what_serves_goes_on() -> None:
    registry = Registry()
    serving = published(registry, a_file())
    registry.fail(a_file(), "digits", "line 3: SyntaxError: invalid syntax")
    assert registry.find("digits") is serving
    (row,) = registry.describe()
    assert row["state"] == "ready" and row["release"] == 1
    update = row["update"]
    assert (update["state"], update["problem"]) == ("failed", "line 3: SyntaxError: invalid syntax")
    assert update["file"] == "digits/1/handler.py" and update["at"].endswith("+00:00")
    published(registry, a_file())
    (row,) = registry.describe()
    assert "update" not in row and row["release"] == 2


async def test_what_never_served_is_broken_until_it_is_gone() -> None:
    registry = Registry()
    registry.fail(a_file(), "digits", "its setup failed")
    with pytest.raises(ServiceBroken, match="GET /v1/services on the logic server says why"):
        registry.find("digits")
    (row,) = registry.describe()
    assert row.pop("at").endswith("+00:00")
    assert row == {"name": "digits", "file": "digits/1/handler.py", "state": "broken", "problem": "its setup failed"}
    registry.withdraw(a_file().origin)
    assert registry.describe() == []
    with pytest.raises(ServiceUnknown):
        registry.describe_one("digits")


async def test_a_broken_version_beside_one_that_serves_is_an_update_that_failed() -> None:
    registry = Registry()
    one = published(registry, a_file(version="1"))
    registry.fail(a_file(version="2"), "digits", "no")
    assert registry.find("digits", key="x") is one
    with pytest.raises(ServiceBroken, match="version '2' of the service 'digits' cannot run"):
        registry.find("digits", "2")
    (row,) = registry.describe()
    assert row["update"]["version"] == "2"


async def test_weights_alone_make_no_service() -> None:
    registry = Registry()
    registry.weigh("digits", {"1": 1})
    assert registry.describe() == []
    with pytest.raises(ServiceUnknown):
        registry.find("digits")
    assert published(registry, a_file()) is registry.find("digits")


async def test_two_files_of_one_name_are_both_listed() -> None:
    registry = Registry()
    published(registry, a_file("same", path="/services/a.py"))
    registry.fail(a_file("same", path="/services/b.py"), "same", "the name 'same' is taken by a.py")
    rows = [(row["state"], row["file"], row.get("problem")) for row in registry.describe()]
    assert rows == [("ready", "a.py", None), ("broken", "b.py", "the name 'same' is taken by a.py")]


async def test_a_release_may_turn_out_broken_later() -> None:
    registry = Registry()
    one = published(registry, a_file())
    registry.break_down(one, "its setup failed")
    registry.break_down(one, "again")
    with pytest.raises(ServiceBroken):
        registry.find("digits")
    assert registry.describe_one("digits")["problem"] == "its setup failed" and one.is_leaving


async def test_versions_are_listed_with_their_shares() -> None:
    registry = Registry()
    for version in ("1", "2", "10"):
        published(registry, a_file(version=version))
    registry.weigh("digits", {"1": 90, "10": 10})
    row = registry.describe_one("digits")
    assert (row["version"], row["path"]) == ("10", "/v1/services/digits")
    assert [(each["version"], each["weight"], each["path"]) for each in row["versions"]] == [
        ("1", 90, "/v1/services/digits/versions/1"),
        ("2", 0, "/v1/services/digits/versions/2"),
        ("10", 10, "/v1/services/digits/versions/10"),
    ]


async def test_what_is_being_set_up_is_told_from_what_is_broken() -> None:
    registry = Registry()
    registry.expect(a_file(), "")
    with pytest.raises(ServiceBroken, match="is being set up: try again") as refused:
        registry.find("digits")
    assert refused.value.retry_after_s == 1.0
    assert registry.describe() == [{"name": "digits", "file": "digits/1/handler.py", "state": "setting up"}]
    published(registry, a_file())
    registry.expect(a_file(), "digits")
    assert registry.describe_one("digits")["update"]["state"] == "setting up" and registry.failed_files == 0
    registry.fail(a_file(), "digits", "no")
    assert registry.describe_one("digits")["update"]["state"] == "failed" and registry.failed_files == 1


async def test_all_services_of_a_file_that_fail_are_listed_until_it_changes() -> None:
    registry = Registry()
    file = a_file("many", path="/services/many.py")
    registry.fail(file, "a", "no disk")
    registry.fail(file, "b", "no network")
    assert [(row["name"], row["problem"]) for row in registry.describe()] == [("a", "no disk"), ("b", "no network")]
    registry.expect(file, "")
    assert [(row["name"], row["state"]) for row in registry.describe()] == [("many", "setting up")]
    registry.fail(file, "a", "still no disk")
    assert [(row["name"], row["problem"]) for row in registry.describe()] == [("a", "still no disk")]
