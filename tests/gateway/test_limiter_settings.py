"""The settings of a gateway's limiter, whose password appears nowhere."""

import argparse
import asyncio
import logging
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis_server import PASSWORD, Proxy, redis_server

from oriel_gateway.app import _limiter
from oriel_gateway.command import _quota_file, add_arguments
from oriel_gateway.limits import EmbeddedLimiter, SharedLimiter
from oriel_gateway.limits.ledger import LedgerLost
from oriel_gateway.limits.redis_ledger import RedisLedger
from oriel_gateway.settings import Settings
from oriel_policies.bounds.ledger import RATE, SLOTS, WINDOW, Ask
from oriel_wire.errors import StartFailed

from ..waiting import until
from .certificates import certificate, needs_openssl

SECRET = "hunter2-in-the-clear"


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--policies", ".", *arguments])


@pytest.mark.parametrize("url", [f"redis://:{SECRET}@h:1/0", f"rediss://u:{SECRET}@h/0", f"http://{SECRET}"])
def test_a_password_in_the_arguments_is_refused_and_not_repeated(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--limiter", url)
    said = capsys.readouterr().err
    assert SECRET not in said and ("ORIEL_LIMITER_PASSWORD" in said or "redis://HOST" in said)


@pytest.mark.parametrize(
    "words", [("--limiter", "redis://h:65536/0"), ("--limiter", "redis://[h"), ("--endpoint", "p=h:65536")]
)
def test_a_port_that_there_is_not_is_refused(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*words)
    assert "HOST:PORT" in capsys.readouterr().err


def test_the_flags_and_their_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert parse().limiter is None
    assert parse("--limiter", "redis://[::1]:6379/2").limiter == "redis://[::1]:6379/2"
    monkeypatch.setenv("ORIEL_STATE", str(tmp_path))
    assert _quota_file(None) == tmp_path / "quotas.db"
    assert _quota_file(Path("none")) is None and _quota_file(Path("x.db")) == Path("x.db")


async def test_what_the_settings_make() -> None:
    assert isinstance(await _limiter(Settings(policies=Path("."))), EmbeddedLimiter)
    for url in (f"amqp://:{SECRET}@h", f"redis://:{SECRET}@h:port/0", f"redis://:{SECRET}@h/one"):
        with pytest.raises(StartFailed) as caught:
            await _limiter(Settings(policies=Path("."), limiter=url))
        assert SECRET not in str(caught.value)
    assert SECRET not in repr(Settings(policies=Path("."), limiter_password=SECRET))


async def test_a_redis_that_is_not_there_is_no_reason_not_to_start(caplog: pytest.LogCaptureFixture) -> None:
    """R30: the failure is logged, without the password."""
    caplog.set_level(logging.DEBUG)
    limiter = await _limiter(
        Settings(policies=Path("."), limiter=f"redis://:{SECRET}@127.0.0.1:1/0", limiter_replicas=2)
    )
    assert isinstance(limiter, SharedLimiter) and isinstance(limiter.ledger_client._ledger, RedisLedger)
    limiter.ledger_client._breaker._threshold = 1
    async with asyncio.timeout(60):
        await until(lambda: not limiter.ledger_client.up)
    await limiter.close()
    assert "cannot be used" in caplog.text and SECRET not in caplog.text


async def test_a_user_of_redis_may_be_narrowed_to_the_commands_that_the_page_names() -> None:
    text = (Path(__file__).parents[2] / "docs/policies.md").read_text()
    ((gateway, others),) = re.findall(r"A user of Redis needs,(.*?)SCRIPT is not needed;(.*?)\n\n", text, re.S)
    rules = [[f"+{name.lower()}" for name in re.findall(r"\b[A-Z]{3,}\b", part)] for part in (gateway, others)]
    asks = [Ask(key=str(kind), kind=kind, limit=9.0, step=1.0, need=1.0) for kind in (RATE, SLOTS, WINDOW)]
    async with redis_server() as server, Redis(port=server.port, password=PASSWORD) as admin:
        user = ("ACL", "SETUSER", "narrow", "reset", "resetchannels", "on", f">{PASSWORD}", "~oriel:*", "&oriel:*")
        await admin.execute_command(*user, *rules[0])
        ledger = RedisLedger(f"redis://narrow@127.0.0.1:{server.port}", holder="g", password=PASSWORD)
        for _ in range(2):
            assert (await ledger.ask([("t", asks)])) != [None]
            assert (await ledger.hello(1.0)).gateways == 1
            assert await ledger.exchange(b"record", edge=True) == {}
            assert await ledger.add_use("2026-11", 1, {"calls": 1}, "0-0", 0)
        async with aclosing(ledger.edges()) as edges:
            await anext(edges)
        with pytest.raises(LedgerLost):
            await ledger.quotas()
        await admin.execute_command(*user, *rules[0], *rules[1])
        assert await ledger.quotas() and (await ledger.examine())[0]
        await ledger.close()
        assert not await admin.hgetall("oriel:present"), "it takes its leave too"


@asynccontextmanager
async def redis_over_tls(chain: Path, key: Path) -> AsyncIterator[int]:
    """Yield the port of a Redis that has this certificate."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(chain, key)
    async with redis_server() as server:
        proxy = Proxy(server.port, tls=tls)
        await proxy.open()
        try:
            yield proxy.port
        finally:
            await proxy.close()


async def check_trust(url: str, authorities: Path | None, known: bool) -> None:
    """Check whether a gateway trusts the Redis at `url`."""
    ledger = RedisLedger(url, holder="a", password=PASSWORD, authorities=authorities)
    if known:
        assert (await ledger.hello(1.0)).gateways == 1
    else:
        with pytest.raises(LedgerLost):
            await ledger.hello(1.0)
    await ledger.close()


@needs_openssl
async def test_a_redis_that_an_authority_of_its_own_signs_for(tmp_path: Path) -> None:
    """Memorystore's certificates are signed by an authority of its own; in other clouds the Secret has no such file."""
    chain, key = certificate(tmp_path, "redis")
    async with redis_over_tls(chain, key) as port:
        for authorities, known in ((chain, True), (tmp_path / "absent.crt", False), (None, False)):
            await check_trust(f"rediss://127.0.0.1:{port}", authorities, known)


async def _announces(ledger: RedisLedger) -> bool:
    """Whether the ledger answers this gateway's announcement; on a busy machine the first connection may be too
    slow.
    """
    try:
        return (await ledger.hello(1.0)).gateways == 1
    except LedgerLost:
        return False


@needs_openssl
async def test_an_authority_that_comes_late_is_believed_from_the_next_connection_on(tmp_path: Path) -> None:
    """The Secret with the authority's certificate is created beside the gateway, so its volume may be empty at the
    start.
    """
    chain, key = certificate(tmp_path, "redis")
    mounted = tmp_path / "mounted.crt"
    async with redis_over_tls(chain, key) as port:
        ledger = RedisLedger(f"rediss://127.0.0.1:{port}", holder="a", password=PASSWORD, authorities=mounted)
        try:
            with pytest.raises(LedgerLost):
                await ledger.hello(1.0)
            mounted.write_text("not a certificate")
            with pytest.raises(LedgerLost):
                await ledger.hello(1.0)
            mounted.write_bytes(chain.read_bytes())
            async with asyncio.timeout(60):
                while not await _announces(ledger):
                    pass
        finally:
            await ledger.close()


@needs_openssl
async def test_an_address_is_not_looked_for_in_the_certificate_of_an_own_authority_and_a_name_is(
    tmp_path: Path,
) -> None:
    """Memorystore's certificates contain no address, and its authority signs nothing else."""
    chain, key = certificate(tmp_path, "redis", hosts="DNS:elsewhere.internal")
    async with redis_over_tls(chain, key) as port:
        for host, known in (("127.0.0.1", True), ("localhost", False)):
            await check_trust(f"rediss://{host}:{port}", chain, known)
