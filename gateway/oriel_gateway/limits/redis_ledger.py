"""The ledger in Redis 6.2 or later: one atomic script per call, on Redis' own clock. Only this file imports redis.

A record is one key, PREFIX{tenant}bound: the braces put all records of a tenant into one hash slot, so the script
stays atomic behind a proxy of a cluster. PREFIXform is the form of all records: a later version of Oriel that changes
one of them writes the next number there, and gateways of this version then leave the records alone. A password is taken
from the environment and is never part of a message.
"""

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from hashlib import sha1
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import ConnectionPool, Redis, SSLConnection
from redis.asyncio.connection import RedisSSLContext
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from oriel_gateway.limits.ledger import (
    MISSED_S,
    PRESENCE_S,
    SLOT_TTL_S,
    STEP_S,
    WHOLE_SHARE,
    LedgerLost,
    Presence,
    Question,
)
from oriel_policies.bounds.ledger import Answer, Ask

_log = logging.getLogger(__name__)
PREFIX = "oriel:"
FORM = 1
MAX_CONNECTIONS = 24
_NAMED = 100
CONNECT_S = 0.5
GOODBYE_S = 0.1
SILENT_S = 60.0
MAX_CAUSE = 160  # characters of an error text of Redis


def _script(file: str) -> str:
    return files("oriel_gateway.limits").joinpath(file).read_text()


_SCRIPT = _script("ledger.lua")
_SHA = sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()  # Redis knows the script by it
_FORM = _script("ledger_form.lua")
_HELLO = _script("ledger_hello.lua")
_EXCHANGE = _script("ledger_exchange.lua")
_USE = _script("ledger_use.lua")
MONTH_S = 40 * 86400  # for this long the sums of a month are kept
_FIELDS = 7
# Error texts of Redis and Lua for a faulty record; any other text is a fault of the server.
_UNREADABLE = ("WRONGTYPE", "attempt to ", "bad argument", "not an integer or out of range")


def _is_address(host: str | None) -> bool:
    try:
        ip_address(host or "127.0.0.1")
    except ValueError:
        return False
    return True


class _Trust(RedisSSLContext):
    """The TLS context of connections, built anew when the file of authorities has changed.

    `get` raises OSError for a file without certificates. With the file, no other authority is trusted: names are not
    compared for an address, so a stranger's certificate would be accepted.
    """

    def __init__(self, host: str | None, authorities: Path | None) -> None:
        super().__init__(cert_reqs=ssl.CERT_REQUIRED, check_hostname=True)
        self._address = _is_address(host)
        self._authorities = authorities
        self._made_of: tuple[int, int, int] | None = None

    def get(self) -> ssl.SSLContext:
        found = self._file()
        if self.context is None or found != self._made_of:
            context = ssl.create_default_context(cafile=self._authorities if found else None)
            context.check_hostname = not (found and self._address)
            self.context, self._made_of = context, found
        return self.context

    def _file(self) -> tuple[int, int, int] | None:
        """Return a key of the file's present version; None if there is no file."""
        if self._authorities is None or not self._authorities.is_file():
            return None
        found = self._authorities.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size


class _TLSConnection(SSLConnection):
    """A connection that takes the context from `_Trust` each time it connects."""

    def __init__(self, *, trust: _Trust, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.ssl_context = trust


class RedisLedger:
    """The `Ledger` at a `redis://` or `rediss://` URL.

    holder: this gateway's unique name in the ledger. prefix: the prefix of all its keys; gateways with another one
    share nothing with these, so that several environments can use one database.
    authorities: a PEM file of the authorities for a `rediss://` URL, read at each connection; while there is no file,
    the authorities that this machine trusts are used. With the file an address in the URL, unlike a name, is not looked
    for in the certificate: a managed Redis with an authority of its own (Memorystore) has no address in there.
    """

    def __init__(
        self,
        url: str,
        *,
        holder: str,
        prefix: str = PREFIX,
        password: str | None = None,
        authorities: Path | None = None,
        slot_ttl_s: float = SLOT_TTL_S,
        presence_s: float = PRESENCE_S,
    ) -> None:
        parts = urlsplit(url)
        username = unquote(parts.username) if parts.username else None
        if password is None and parts.password:
            password = unquote(parts.password)
        self._holder = holder
        self._prefix, self._present, self._demand = prefix, f"{prefix}present", f"{prefix}demand"
        self._slot_ttl_s = slot_ttl_s
        self._presence_s = presence_s
        self._known_form = False
        self._heard_s = 0.0  # when the last `hello` that was answered was sent
        self._named: set[str] = set()  # tenants with unreadable records, each logged once
        tls: dict[str, Any] = {}
        if parts.scheme == "rediss":
            tls = {"connection_class": _TLSConnection, "trust": _Trust(parts.hostname, authorities)}
        pool = ConnectionPool(
            host=parts.hostname or "127.0.0.1",
            port=parts.port or 6379,
            db=int(parts.path.strip("/") or 0),
            username=username,
            password=password,
            # The caller gives up late answers, and decides on retries as well.
            retry=Retry(NoBackoff(), 0),
            retry_on_error=[],
            socket_connect_timeout=CONNECT_S,
            max_connections=MAX_CONNECTIONS,
            protocol=2,
            driver_info=None,
            **tls,
        )
        self._redis = Redis.from_pool(pool)

    async def ask(self, questions: Sequence[Question]) -> list[list[Answer] | None]:
        if not self._known_form:
            await self._check_form()
        try:
            raw = await self._run(questions, range(len(questions)))
            unknown = [number for number, answer in enumerate(raw) if isinstance(answer, NoScriptError)]
            if unknown:  # a fresh, flushed or failed over Redis
                for number, answer in zip(unknown, await self._run(questions, unknown, known=False), strict=True):
                    raw[number] = answer
        except (RedisError, OSError) as error:
            raise _lost(error) from error
        for number, answer in enumerate(raw):
            if isinstance(answer, ResponseError) and any(words in str(answer) for words in _UNREADABLE):
                self._unreadable(questions[number][0])
                raw[number] = None
            elif isinstance(answer, Exception):
                # This includes READONLY and LOADING of a failover: the connection may lead to the wrong server.
                await self._redis.connection_pool.disconnect(inuse_connections=False)
                raise _lost(answer) from answer
        return [None if answer is None else _answers(answer) for answer in raw]

    async def hello(self, share: float) -> Presence:
        self._known_form = False  # a later version may have begun since
        now = monotonic()
        since = now - self._heard_s if self._heard_s else -1.0
        bounds = (self._presence_s, int(MISSED_S), WHOLE_SHARE)
        keys = [self._present, f"{self._prefix}{{{self._present}}}count"]  # one hash slot
        count, silent, alone = await self._eval(_HELLO, keys, share, *bounds, since, STEP_S)
        self._heard_s = now
        return Presence(int(count), int(silent), float(alone))

    async def exchange(self, records: bytes, *, edge: bool = False) -> dict[str, tuple[bytes, float]]:
        found = await self._eval(_EXCHANGE, [self._demand], records, int(MISSED_S), STEP_S, int(edge))
        return {holder.decode(): (record, float(age_s)) for holder, age_s, record in found}

    async def edges(self) -> AsyncGenerator[None]:
        holder = self._holder.encode()
        try:
            async with self._redis.pubsub() as channel:
                await channel.subscribe(self._demand)
                # A connection that has died is silent as well: after a while without an edge there is another one.
                while (message := await channel.get_message(timeout=SILENT_S)) is not None:
                    if (
                        message["data"] != holder
                    ):  # also the answer to SUBSCRIBE: what was published before it is unknown
                        yield
        except (RedisError, OSError) as error:
            raise _lost(error) from error

    async def add_use(
        self, month: str, number: int, sums: Mapping[str, int], after: str, since_s: int
    ) -> tuple[dict[str, int], str]:
        keys = [f"{self._prefix}{{use}}{month}", f"{self._prefix}{{use}}{month}:log"]
        added = [each for pair in sums.items() for each in pair]
        place, found = await self._eval(_USE, keys, number, after, since_s, MONTH_S, *added)
        sums_of: Counter[str] = Counter()
        for name, value in zip(found[::2], found[1::2], strict=True):
            sums_of[name.decode("utf-8", "replace")] += int(value)
        return dict(sums_of), place.decode()

    async def examine(self) -> tuple[str, float]:
        """Run the script on nothing and return the server's version and clock; this gateway is not announced.

        Raises LedgerLost with the kind of the error.
        """
        try:
            await self._redis.eval(_SCRIPT, 0, self._holder, 0)
            seconds, microseconds = await self._redis.time()
            return str((await self._redis.info("server")).get("redis_version", "")), seconds + microseconds / 1e6
        except (RedisError, OSError) as error:
            raise _lost(error) from error

    async def quotas(self) -> list[tuple[str, str, str, int, int]]:
        """Return the quotas of all tenants as rows of a quota file: tenant, bound, period, number, used. Raises
        LedgerLost.
        """
        found = []
        try:
            async for key in self._redis.scan_iter(match=f"{self._prefix}{{*}}*", count=1000, _type="hash"):
                record: dict[Any, Any] = await self._redis.hgetall(key)
                if {b"period", b"number", b"used"} <= record.keys():  # else it counts slots, or no gateway wrote it
                    tenant, _, bound = key.decode()[len(self._prefix) + 1 :].partition("}")
                    counts = (int(float(record[name])) for name in (b"number", b"used"))
                    found.append((tenant, bound, record[b"period"].decode(), *counts))
        except (RedisError, OSError) as error:
            raise _lost(error) from error
        return sorted(set(found))

    async def close(self) -> None:
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._redis.hdel(self._present, self._holder)
                await self._redis.hdel(self._demand, self._holder)
        except (RedisError, OSError, TimeoutError):
            pass  # the entry expires after MISSED_S
        await self._redis.aclose()

    async def _eval(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        """Run a script. Raises LedgerLost, and no waiting connection is used again: it may lead to the wrong server."""
        if not self._known_form and script is not _FORM:
            await self._check_form()
        try:
            return await self._redis.eval(script, len(keys), *keys, self._holder, *arguments)
        except (RedisError, OSError) as error:
            await self._redis.connection_pool.disconnect(inuse_connections=False)
            raise _lost(error) from error

    async def _check_form(self) -> None:
        """Mark the records with their form; raise LedgerLost if there is a mark of a later one."""
        found = (await self._eval(_FORM, [f"{self._prefix}form"], FORM, MONTH_S)).decode("utf-8", "replace")
        if found != str(FORM):
            raise LedgerLost(
                f"the records {self._prefix}* are of form {found[:20]}, of a later version of Oriel, and this one "
                f"reads form {FORM}: run that version, or give this one another --limiter-prefix"
            )
        self._known_form = True

    def _unreadable(self, tenant: str) -> None:
        if tenant not in self._named and len(self._named) < _NAMED:
            self._named.add(tenant)
            _log.error(
                "the counters of tenant %s in Redis were not written by a gateway of this version: each gateway limits "
                "the tenant by itself until the keys %s{%s}* are deleted",
                tenant,
                self._prefix,
                tenant,
            )

    async def _run(self, questions: Sequence[Question], which: Sequence[int], *, known: bool = True) -> list[Any]:
        """Run the script once per question. known: Redis has it already; else its text is sent, as SCRIPT LOAD may be
        forbidden where EVAL is not.
        """
        ttl_us = int(self._slot_ttl_s * 1e6)
        async with self._redis.pipeline(transaction=False) as pipe:
            run, script = (pipe.evalsha, _SHA) if known else (pipe.eval, _SCRIPT)
            for number in which:
                tenant, asks = questions[number]
                keys = [f"{self._prefix}{{{tenant}}}{ask.key}" for ask in asks]
                run(script, len(keys), *keys, self._holder, ttl_us, *_arguments(asks))
            return await pipe.execute(raise_on_error=False)


def _lost(error: Exception) -> LedgerLost:
    """Return the error that names the cause: the kind, and what Redis itself says."""
    text = f": {str(error)[:MAX_CAUSE]}" if isinstance(error, ResponseError) else ""
    return LedgerLost(f"{type(error).__name__}{text}")


def _arguments(asks: Sequence[Ask]) -> list[str | float]:
    out: list[str | float] = []
    for ask in asks:
        out += (ask.kind, ask.limit, ask.step, ask.need, ask.want, ask.debt, ask.spent, ask.number, ask.born, ask.used)
    return out


def _answers(raw: Sequence[bytes]) -> list[Answer]:
    values = [float(text) for text in raw]
    return [
        Answer(
            granted=values[at],
            wait_us=values[at + 1],
            left=values[at + 2],
            number=int(values[at + 3]),
            born=int(values[at + 4]),
            used=values[at + 5],
            ends_us=values[at + 6],
        )
        for at in range(0, len(values), _FIELDS)
    ]
