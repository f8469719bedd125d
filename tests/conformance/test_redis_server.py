"""Which redis-server the tests start: the requested version, or none."""

import os
from pathlib import Path

import pytest
from redis.asyncio import Redis

from .redis_server import BUILT, PASSWORD, binary, is_version, redis_server


def fake(folder: Path, version: str) -> Path:
    folder.mkdir()
    server = folder / "redis-server"
    server.write_text(f"#!/bin/sh\necho Redis server v={version} sha=0 bits=64\n")
    server.chmod(0o755)
    return server


def test_another_version_on_the_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = fake(tmp_path / "old", "6.2.99"), fake(tmp_path / "new", "8.4.0")
    monkeypatch.setenv("PATH", f"{new.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("ORIEL_TEST_REDIS", raising=False)
    assert binary() == str(new)
    monkeypatch.setenv("ORIEL_TEST_REDIS", "6.2")
    if not BUILT.exists():
        pytest.skip("no build/redis: make test makes it")
    assert binary() != str(new) and is_version(binary(), "6.2")
    monkeypatch.setenv("PATH", f"{old.parent}{os.pathsep}{os.environ['PATH']}")
    assert binary() == str(old)
    for wanted in ("6", "6.2.9", "62", "7"):
        assert is_version(str(old), wanted) is (wanted == "6")
    monkeypatch.setenv("ORIEL_TEST_REDIS", "5.9")
    with pytest.raises(pytest.fail.Exception, match=r"a redis-server 5\.9"):
        binary()


async def test_the_server_that_runs_is_the_one_that_was_asked_for() -> None:
    wanted = os.environ.get("ORIEL_TEST_REDIS", "")
    async with redis_server() as server, Redis(port=server.port, password=PASSWORD) as client:
        version = (await client.info("server"))["redis_version"]
    assert version.startswith(wanted)
