"""The public keys of every issuer: read from the documents at once, or fetched from an https URL in the background.

One background task fetches a URL: at first use, every `refresh_s`, and early (at most every `EARLY_S`) when a token
names an unknown key. Only the next fetch says if that key is a new one, so until then its holder is told to
come back: strangers who invent keys cannot have holders of new ones refused. If a further fetch fails, the keys stay in
use for `STALE_S`; a set that was fetched without any key has withdrawn them all. Redirects are not followed, an answer
is bounded in bytes and time, and nothing that a client sends chooses an address.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from hashlib import sha256
from math import ceil, inf
from time import monotonic
from typing import Any

import httpx

from oriel_gateway.identity.public_keys import PublicKey, parse_key_set
from oriel_policies.documents import Issuer
from oriel_policies.documents.issuers import MAX_KEY_SET_BYTES

_log = logging.getLogger(__name__)
FETCH_TIMEOUT_S = 5.0
EARLY_S = 10.0
STALE_S = 24 * 3600.0
_MAX_RETRY_S = 60.0
_IDLE_S = 3600.0
_MAX_SOUGHT = 1024
_NO_KEYS = "no key in it can verify a token"


class _Known:
    """The keys of one issuer. Times are monotonic seconds. keys: the present keys; None until the first ones came.

    sought: hash of the id of an unknown key -> time when a token named it.
    read_s: begin of the latest fetch that succeeded.
    """

    def __init__(self, issuer: Issuer) -> None:
        self.issuer = issuer
        self.keys: tuple[PublicKey, ...] | None = None
        self.sought: dict[int, float] = {}
        self.digest = b""
        self.error = ""
        self.failures = 0
        self.fetched_s = self.read_s = self.tried_s = self.next_s = 0.0


class KeySets:
    """The key sets of all issuers. Single writer: the loop.

    changed: called when keys were replaced, so that what they verified is forgotten.
    fetch_timeout_s: seconds allowed for a whole answer of an issuer.
    """

    def __init__(
        self,
        changed: Callable[[], None],
        *,
        fetch_timeout_s: float = FETCH_TIMEOUT_S,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._changed = changed
        self._fetch_timeout_s = fetch_timeout_s
        self._now = now
        self._known: dict[str, _Known] = {}
        self._wake = asyncio.Event()

    def adopt(self, issuers: Iterable[Issuer]) -> None:
        """Adopt the issuers of new documents. An issuer whose source of keys stays the same keeps its keys."""
        before, self._known = self._known, {}
        for issuer in issuers:
            known = before.get(issuer.name)
            same = known is not None and (known.issuer.jwks, known.issuer.algorithms) == (
                issuer.jwks,
                issuer.algorithms,
            )
            if known is None or not same or issuer.key_set:
                known = _Known(issuer)
            known.issuer = issuer
            if issuer.key_set:
                known.keys = parse_key_set(issuer.key_set, issuer.algorithms)
                known.fetched_s = self._now()
            self._known[issuer.name] = known
        self._wake.set()

    def keys(self, issuer: Issuer) -> tuple[PublicKey, ...] | None:
        """Return the keys of an issuer; None if there were none yet, or none for too long."""
        known = self._known.get(issuer.name)
        return None if known is None else known.keys

    def wait_for(self, issuer: Issuer, kid: str | None) -> int:
        """Return in how many seconds it is known whether an unknown key of a token is a new one; 0: it is none.

        The issuer's keys are fetched early if that is not known yet. kid: the key's id.
        """
        known = self._known.get(issuer.name)
        if known is None or issuer.key_set:
            return 0
        now, key = self._now(), hash(kid or "")
        if known.sought.get(key, inf) <= known.read_s and now < known.read_s + EARLY_S:
            return 0
        if len(known.sought) >= _MAX_SOUGHT:
            known.sought.clear()  # whoever asks again waits for one fetch more
        if known.sought.get(key, 0.0) <= known.read_s:
            known.sought[key] = now
        known.next_s = min(known.next_s, max(now, known.tried_s + EARLY_S))
        self._wake.set()
        return max(1, ceil(known.next_s - now))

    def report(self) -> list[dict[str, Any]]:
        """Return the state of all issuers for the admin port and metrics. age_s: since the keys were read; None
        without keys.
        """
        now = self._now()
        return [
            {
                "issuer": name,
                "keys": len(known.keys or ()),
                "age_s": round(now - known.fetched_s, 1) if known.keys is not None else None,
                "error": known.error,
            }
            for name, known in self._known.items()
        ]

    async def run(self, client: httpx.AsyncClient | None = None) -> None:
        """Fetch what is due until cancelled."""
        while True:
            self._wake.clear()
            now = self._now()
            remote = [known for known in self._known.values() if not known.issuer.key_set]
            due = [known for known in remote if known.next_s <= now]
            if due:
                if client is None:
                    client = await self._open(due)
                    if client is None:
                        continue
                await asyncio.gather(*[self._refresh(client, known) for known in due])
                continue
            wait_s = min((known.next_s for known in remote), default=now + _IDLE_S) - now
            try:
                async with asyncio.timeout(max(0.0, wait_s)):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _open(self, due: list[_Known]) -> httpx.AsyncClient | None:
        try:
            # Loading the certificates of a TLS context takes longer than the loop may be blocked.
            return await asyncio.to_thread(_client)
        except Exception as error:
            # An SSL_CERT_FILE or a proxy of the environment may be unusable, such as SOCKS, for which httpx needs
            # another module. Every error is caught, since one that escaped would end the gateway; its text is not
            # logged, because it may quote the proxy's password.
            why = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
            for known in due:
                self._failed(known, f"the certificates or the proxy of this machine cannot be used: {why}")
            return None

    async def _refresh(self, client: httpx.AsyncClient, known: _Known) -> None:
        issuer = known.issuer
        known.tried_s = self._now()
        try:
            async with asyncio.timeout(self._fetch_timeout_s):
                data = await _fetch(client, issuer.jwks)
            keys = await asyncio.to_thread(parse_key_set, data, issuer.algorithms)
            if not keys and not known.keys:
                raise ValueError(_NO_KEYS)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError) as error:
            self._failed(known, _why(error))
            return
        except Exception:
            # This is the edge of a task that must live: the known keys stay in use.
            _log.exception("the keys of issuer %s cannot be read", issuer.name)
            self._failed(known, "it cannot be read")
            return
        if known.failures:
            _log.info("the keys of issuer %s can be fetched again", issuer.name)
        known.failures, known.error = 0, "" if keys else _NO_KEYS
        if not keys:
            _log.warning("issuer %s has withdrawn its keys: %s", issuer.name, _NO_KEYS)
        known.fetched_s = now = self._now()
        known.read_s = known.tried_s
        known.next_s = now + issuer.refresh_s * random.uniform(0.9, 1.0)
        digest = sha256(data).digest()
        if digest != known.digest:
            replaced = known.keys is not None
            # Keys that are not in the new set are withdrawn.
            known.sought |= {hash(key.kid): known.read_s for key in known.keys or ()}
            known.keys, known.digest = keys, digest
            if replaced:
                self._changed()

    def _failed(self, known: _Known, error: str) -> None:
        now = self._now()
        if not known.failures:
            _log.warning("the keys of issuer %s cannot be fetched: %s", known.issuer.name, error)
        known.failures += 1
        known.error = error
        known.next_s = now + min(_MAX_RETRY_S, 2.0 ** min(known.failures, 10))
        if known.keys is not None and now - known.fetched_s > STALE_S:
            known.keys, known.digest = None, b""
            self._changed()


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(follow_redirects=False, timeout=FETCH_TIMEOUT_S)


def _why(error: Exception) -> str:
    """Return in our own words why keys cannot be fetched: a library's text may quote the URL or the answer."""
    match error:
        case TimeoutError() | httpx.TimeoutException():
            return "it takes too long"
        case httpx.ConnectError():
            return "its server cannot be reached"
        case httpx.HTTPError() | httpx.InvalidURL():
            return f"the exchange with its server failed ({type(error).__name__})"
    return str(error)


async def _fetch(client: httpx.AsyncClient, url: str) -> bytes:
    async with client.stream("GET", url, headers={"accept-encoding": "identity"}) as answer:
        if answer.status_code != 200:
            raise ValueError(f"the server answers {answer.status_code}")
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise ValueError("the key set came compressed: have it sent uncompressed")
        data = bytearray()
        async for piece in answer.aiter_raw():
            data += piece
            if len(data) > MAX_KEY_SET_BYTES:
                raise ValueError(f"it is larger than {MAX_KEY_SET_BYTES} bytes")
        return bytes(data)
