"""Key sets behind a URL: fetched beside the calls, kept during an outage, and never from an address that a client
names.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest

from oriel_gateway.identity import key_sets as module
from oriel_gateway.identity.key_sets import EARLY_S, STALE_S, KeySets
from oriel_policies.documents import Issuer, compile_documents

from ..waiting import until
from .gate import INFER
from .stack import Client, documents, gateway, upstream
from .tokens import issuer_table, jwk, key_set, token

URL = "https://login.example/keys"


def answer(data: bytes = b"", status: int = 200, **headers: str) -> httpx.Response:
    return httpx.Response(status, stream=httpx.ByteStream(data), headers=headers)


class Provider:
    """An identity provider. answer: returns its next answer. asked: the requests that it received."""

    def __init__(self, *keys: dict) -> None:  # type: ignore[type-arg]
        self.asked: list[httpx.Request] = []
        self.now = 1000.0
        self.changes = 0
        self.answer: Callable[[], httpx.Response] = lambda: answer(key_set(*keys))

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        return self.answer()

    def changed(self) -> None:
        self.changes += 1


def the_issuer(**more: str) -> Issuer:
    return compile_documents({"a.toml": issuer_table(URL, **more).encode()}).issuers["login"]


@asynccontextmanager
async def fetching(
    provider: Provider, issuer: Issuer, **more: float
) -> AsyncIterator[tuple[KeySets, Callable[[], object]]]:
    sets = KeySets(provider.changed, now=lambda: provider.now, **more)
    sets.adopt([issuer])
    client = httpx.AsyncClient(transport=httpx.MockTransport(provider.handle), follow_redirects=False)
    running = asyncio.ensure_future(sets.run(client))

    async def turn() -> None:
        """Have the fetches that are due made, and wait for their end; the fake clock wakes nothing by itself."""
        sets._wake.set()
        fetched = [known for known in sets._known.values() if not known.issuer.key_set]
        await until(lambda: not sets._wake.is_set() and all(known.next_s > provider.now for known in fetched))

    try:
        await turn()
        yield sets, turn
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await client.aclose()


def kids(sets: KeySets, issuer: Issuer) -> list[str] | None:
    keys = sets.keys(issuer)
    return None if keys is None else [key.kid for key in keys]


async def test_a_url_is_fetched_at_once_and_again_when_it_is_due() -> None:
    provider, issuer = Provider(jwk("ES256")), the_issuer()
    async with fetching(provider, issuer) as (sets, turn):
        assert kids(sets, issuer) == ["ES256-0"] and len(provider.asked) == 1 and str(provider.asked[0].url) == URL
        await turn()
        assert len(provider.asked) == 1
        provider.answer = lambda: answer(key_set(jwk("ES256", 1)))
        provider.now += 301
        await turn()
        assert kids(sets, issuer) == ["ES256-1"] and provider.changes == 1
        provider.now += 301
        await turn()
        # the same keys as before: no remembered token is forgotten
        assert len(provider.asked) == 3 and provider.changes == 1


FAILURES: list[Callable[[], httpx.Response]] = [
    lambda: answer(status=500),
    lambda: answer(key_set(jwk("ES256", 1)), status=404),
    lambda: answer(status=302, location="http://169.254.169.254/keys"),
    lambda: answer(b"<html>"),
    lambda: (_ for _ in ()).throw(httpx.ConnectError("refused")),
]


@pytest.mark.parametrize("failure", FAILURES)
async def test_what_cannot_be_fetched_again_stays_in_use_for_a_day(
    failure: Callable[[], httpx.Response], caplog: pytest.LogCaptureFixture
) -> None:
    provider, issuer = Provider(jwk("ES256")), the_issuer()
    good = provider.answer
    async with fetching(provider, issuer) as (sets, turn):
        provider.answer = failure
        for _ in range(3):
            provider.now += 400
            await turn()
        assert kids(sets, issuer) == ["ES256-0"] and sets.report()[0]["error"]
        assert len(caplog.records) == 1 and "issuer login" in caplog.text
        assert len(provider.asked) == 4  # one request per turn
        assert {str(request.url) for request in provider.asked} == {URL}
        provider.now += STALE_S
        await turn()
        assert sets.keys(issuer) is None and provider.changes == 1
        provider.answer = good
        provider.now += 100
        await turn()
        assert kids(sets, issuer) == ["ES256-0"] and sets.report()[0]["error"] == ""


@pytest.mark.parametrize("left", [[], [{"kty": "oct", "k": "c2VjcmV0", "kid": "ES256-0"}]])
async def test_a_set_without_keys_withdraws_them_at_once(left: list[dict[str, str]]) -> None:
    """An empty set is no failed fetch, after which the withdrawn keys would stay in use for a day."""
    provider, issuer = Provider(jwk("ES256")), the_issuer()
    good = provider.answer
    async with fetching(provider, issuer) as (sets, turn):
        provider.answer = lambda: answer(key_set(*left))
        provider.now += 301
        await turn()
        assert kids(sets, issuer) == [] and provider.changes == 1
        assert sets.report()[0]["error"] == "no key in it can verify a token"
        provider.answer = good
        provider.now += 301
        await turn()
        assert kids(sets, issuer) == ["ES256-0"] and provider.changes == 2 and not sets.report()[0]["error"]


async def test_an_unknown_key_is_looked_for_early_but_not_often() -> None:
    provider, issuer = Provider(jwk("ES256")), the_issuer()
    async with fetching(provider, issuer) as (sets, turn):
        provider.now += 1
        for number in range(5):
            assert sets.wait_for(issuer, f"invented-{number}") == EARLY_S - 1
            await turn()
        assert len(provider.asked) == 1
        provider.now += EARLY_S + 1
        await turn()
        assert len(provider.asked) == 2
        assert [sets.wait_for(issuer, f"invented-{number}") for number in range(5)] == [0] * 5
        provider.now += EARLY_S  # it may be new now
        assert sets.wait_for(issuer, "invented-0") == 1


async def test_no_stranger_can_have_the_holder_of_a_new_key_refused() -> None:
    """While somebody sent invented key ids, holders of a key that had just been made got 401 for ten seconds."""
    provider, issuer = Provider(jwk("ES256")), the_issuer()
    async with fetching(provider, issuer) as (sets, turn):
        for number in range(3):
            provider.now += EARLY_S + 1
            assert sets.wait_for(issuer, "invented")
            await turn()
            assert not sets.wait_for(issuer, "invented")  # known to be none
            assert sets.wait_for(issuer, f"new-{number}") == EARLY_S  # may be new: come back
        assert sets.wait_for(issuer, "ES256-1") == EARLY_S
        provider.answer = lambda: answer(key_set(jwk("ES256", 1)))
        provider.now += EARLY_S
        await turn()
        assert kids(sets, issuer) == ["ES256-1"]


async def test_a_key_is_not_said_to_be_none_by_a_fetch_that_failed() -> None:
    provider, issuer = Provider(jwk("ES256")), the_issuer()
    async with fetching(provider, issuer) as (sets, turn):
        provider.now += EARLY_S + 1
        provider.answer = lambda: answer(status=500)
        assert sets.wait_for(issuer, "new") == 1
        await turn()
        assert sets.wait_for(issuer, "new") > 0


async def test_ids_that_were_asked_for_are_bounded() -> None:
    provider, issuer = Provider(jwk("ES256")), the_issuer()
    async with fetching(provider, issuer) as (sets, _):
        most = 0
        for number in range(5000):
            assert sets.wait_for(issuer, f"invented-{number}")
            most = max(most, len(sets._known["login"].sought))
        assert most == 1024


async def test_a_url_is_fetched_again_after_nine_tenths_of_the_time_at_the_earliest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounds = []
    monkeypatch.setattr(module.random, "uniform", lambda least, most: bounds.append((least, most)) or least)
    provider, issuer = Provider(jwk("ES256")), the_issuer()
    async with fetching(provider, issuer) as (_, turn):
        for later, asked in ((269.5, 1), (0.5, 2), (269.5, 2), (0.5, 3)):
            provider.now += later
            await turn()
            assert len(provider.asked) == asked
        assert set(bounds) == {(0.9, 1.0)}


async def test_it_sleeps_until_the_next_fetch_is_due_and_without_issuers_for_an_hour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    def timeout(seconds: float) -> asyncio.Timeout:
        if seconds != 7.0:  # that of a fetch
            slept.append(seconds)
        return asyncio.timeout(seconds)

    monkeypatch.setattr(module, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout": timeout}))
    monkeypatch.setattr(module.random, "uniform", lambda least, most: most)
    provider, issuer = Provider(jwk("ES256")), the_issuer()
    async with fetching(provider, issuer, fetch_timeout_s=7.0) as (sets, turn):
        await until(lambda: slept)
        assert set(slept) == {300.0}
        slept.clear()
        provider.now += 290.0
        await turn()
        await until(lambda: slept)
        assert set(slept) == {10.0}
        slept.clear()
        sets.adopt([])
        await until(lambda: slept)
        assert set(slept) == {3600.0}


async def test_a_fetch_that_failed_is_tried_again_after_2_4_8_and_at_most_60_s() -> None:
    provider, issuer = Provider(jwk("ES256")), the_issuer()
    good, provider.answer = provider.answer, lambda: answer(status=500)
    async with fetching(provider, issuer) as (sets, turn):
        for wait_s in (2, 4, 8, 16, 32, 60, 60, 60, 60, 60, 60):
            asked = len(provider.asked)
            provider.now += wait_s - 0.5
            await turn()
            assert len(provider.asked) == asked and sets.keys(issuer) is None
            provider.now += 0.5
            await turn()
            assert len(provider.asked) == asked + 1
        provider.answer = good
        provider.now += 60
        await turn()
        provider.answer = lambda: answer(status=500)
        for wait_s in (300, 2, 4):
            asked = len(provider.asked)
            provider.now += wait_s
            await turn()
            assert len(provider.asked) == asked + 1


@pytest.mark.parametrize(("late_s", "stays"), [(-1, True), (0, True), (1, False)])
async def test_keys_stay_in_use_for_86400_s_after_they_were_read(late_s: int, stays: bool) -> None:
    provider, issuer = Provider(jwk("ES256")), the_issuer()
    async with fetching(provider, issuer) as (sets, turn):
        provider.answer = lambda: answer(status=500)
        provider.now += 86_400 + late_s
        await turn()
        assert kids(sets, issuer) == (["ES256-0"] if stays else None) and provider.changes == (not stays)
        (found,) = sets.report()
        age_s = 86_400.0 + late_s if stays else None
        assert found == {"issuer": "login", "keys": int(stays), "age_s": age_s, "error": "the server answers 500"}


@pytest.mark.parametrize(("size", "taken"), [(262_144, True), (262_145, False)])
async def test_a_set_of_keys_has_at_most_256_kib(size: int, taken: bool) -> None:
    provider, issuer = Provider(), the_issuer()
    provider.answer = lambda: answer(key_set(jwk("ES256")).ljust(size))
    async with fetching(provider, issuer) as (sets, _):
        assert kids(sets, issuer) == (["ES256-0"] if taken else None)
        assert sets.report()[0]["error"] == ("" if taken else "it is larger than 262144 bytes")


async def test_a_compressed_set_is_not_read() -> None:
    provider, issuer = Provider(), the_issuer()
    for encoding, error in (("gzip", "the key set came compressed: have it sent uncompressed"), ("identity", "")):
        coded = {"content-encoding": encoding}
        provider.answer = lambda coded=coded: answer(key_set(jwk("ES256")), **coded)  # type: ignore[misc]
        async with fetching(provider, issuer) as (sets, _):
            assert sets.report()[0]["error"] == error
            assert provider.asked[-1].headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (httpx.ConnectError("http://user:s3cret@proxy"), "its server cannot be reached"),
        (httpx.ReadTimeout("s3cret"), "it takes too long"),
        (httpx.RemoteProtocolError("s3cret"), "the exchange with its server failed (RemoteProtocolError)"),
        (httpx.InvalidURL("s3cret"), "the exchange with its server failed (InvalidURL)"),
    ],
)
async def test_what_a_library_says_of_a_failure_is_not_shown(
    failure: Exception, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    provider, issuer = Provider(), the_issuer()
    provider.answer = lambda: (_ for _ in ()).throw(failure)
    async with fetching(provider, issuer) as (sets, _):
        assert sets.report()[0]["error"] == why and "s3cret" not in caplog.text


async def test_what_an_issuer_sends_instead_of_keys_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    provider, issuer = Provider(), the_issuer()
    provider.answer = lambda: answer(b'{"keys": "s3cret"}')
    async with fetching(provider, issuer) as (sets, _):
        assert sets.report()[0]["error"] == "it is not a JSON Web Key Set"


async def test_one_odd_entry_does_not_cost_the_other_keys() -> None:
    odd = [None, 7, "x", [], [None], True]
    provider, issuer = Provider(*odd, jwk("ES256")), the_issuer()  # type: ignore[arg-type]
    async with fetching(provider, issuer) as (sets, _):
        assert kids(sets, issuer) == ["ES256-0"] and not sets.report()[0]["error"]
    beside = {"a.toml": issuer_table("keys.json").encode(), "keys.json": key_set(*odd, jwk("ES256"))}  # type: ignore[arg-type]
    assert compile_documents(beside).issuers["login"].key_set


async def test_an_answer_without_end_is_given_up() -> None:
    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            while True:
                await asyncio.sleep(0.01)
                yield b" "

    provider, issuer = Provider(), the_issuer()
    provider.answer = lambda: httpx.Response(200, stream=Endless())
    async with fetching(provider, issuer, fetch_timeout_s=0.05) as (sets, _):
        assert sets.keys(issuer) is None and sets.report()[0]["error"] == "it takes too long"


async def test_new_documents_keep_the_keys_of_an_issuer_that_stays() -> None:
    provider, issuer = Provider(jwk("ES256")), the_issuer()
    async with fetching(provider, issuer) as (sets, turn):
        same = the_issuer(leeway_s="5")
        sets.adopt([same])
        await turn()
        assert kids(sets, same) == ["ES256-0"] and len(provider.asked) == 1
        sets.adopt([])
        assert sets.keys(same) is None
        sets.adopt([same])
        await turn()
        assert len(provider.asked) == 2
        sets.adopt([the_issuer(algorithms='["RS256"]')])
        assert sets.keys(same) is None
        await turn()
        assert len(provider.asked) == 3


async def test_tokens_before_the_first_keys_are_told_to_come_back_and_replaced_keys_end_them() -> None:
    async with upstream() as up:
        files = documents([up.port], extra=issuer_table(URL))
        async with gateway(files) as (port, core), Client(port) as client:
            reply = await client.ask(INFER, key=token())
            assert reply.status == 503 and reply.headers["retry-after"] == "1" and b"identity_unavailable" in reply.body
            provider = Provider(jwk("ES256"))
            assert core.key_sets is not None
            web = httpx.AsyncClient(transport=httpx.MockTransport(provider.handle))
            running = asyncio.ensure_future(core.key_sets.run(web))
            sets, issuer = core.key_sets, core.snapshot.issuers["login"]
            await until(lambda: kids(sets, issuer) == ["ES256-0"])
            for _ in range(3):
                assert (await client.ask(INFER, key=token(exp=4_000_000_000, iat=None))).status == 200
            provider.answer = lambda: answer(key_set(jwk("ES256", 1)))
            sets._known["login"].next_s = 0.0
            sets._wake.set()
            await until(lambda: kids(sets, issuer) == ["ES256-1"])
            assert (await client.ask(INFER, key=token(exp=4_000_000_000, iat=None))).status == 401
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await web.aclose()


async def test_certificates_that_cannot_be_read_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> httpx.AsyncClient:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(module, "_client", broken)
    sets, issuer = KeySets(lambda: None), the_issuer()
    sets.adopt([issuer])
    running = asyncio.ensure_future(sets.run())
    await until(lambda: sets.report()[0]["error"])
    assert "certificates" in sets.report()[0]["error"] and not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("proxy", ["socks5://user:hunter2@127.0.0.1:1", "http://user:hun/ter2@h", "gopher://hunter2@h"])
async def test_a_proxy_that_cannot_be_used_ends_nothing_and_is_not_quoted(
    proxy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For an ALL_PROXY with SOCKS httpx raises ImportError, which must not end the gateway."""
    monkeypatch.setenv("ALL_PROXY", proxy)
    sets = KeySets(lambda: None)
    sets.adopt([the_issuer()])
    running = asyncio.ensure_future(sets.run())
    try:
        await until(lambda: running.done() or sets.report()[0]["error"])
        assert not running.done(), running.exception()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert "hun" not in caplog.text + sets.report()[0]["error"] and "proxy" in caplog.text


async def test_a_connection_whose_tokens_nobody_can_check_ends_after_some_bytes() -> None:
    padding = f"x-padding: {'a' * 6000}\r\n"
    async with upstream() as up:
        files = documents([up.port], extra=issuer_table(URL))
        async with gateway(files) as (port, _), Client(port) as client:
            for _ in range(60):  # half of the 512 KiB that are read of refused requests are 43 of them
                reply = await client.ask(INFER, key=token(), headers=padding)
                assert reply.status == 503
                if reply.headers.get("connection") == "close":
                    return
    raise AssertionError("the connection takes any number of them")


async def test_the_client_of_key_sets_follows_no_redirect() -> None:
    async with module._client() as client:
        assert not client.follow_redirects
