"""Where the rules of keys and tickets turn: their lengths, numbers and ends."""

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.identity import keys as keys_module
from oriel_gateway.identity import tenant_buckets, tickets
from oriel_gateway.identity.callers import MOST_KNOWN, Callers
from oriel_gateway.identity.keys import identify, looks_like_token, still_valid
from oriel_gateway.identity.tenant_buckets import OtherRequests
from oriel_gateway.identity.tickets import Tickets, ticket_keys
from oriel_policies.documents import ApiKey, compile_documents
from oriel_wire.errors import StartFailed

LONGEST = "k" * 4096
DOTTED = "eyJ.a.key"  # a key that looks like a token
SNAPSHOT = compile_documents(
    {
        "a.toml": f"""
[tiers.gold]
band = 0
target_ms = 1000
stream_max_ms = 100000
stream_idle_ms = 1000
[tenants.t]
tier = "gold"
keys = [{{ sha256 = "{sha256(LONGEST.encode()).hexdigest()}" }}, {{ sha256 = "{sha256(b"short").hexdigest()}" }},
    {{ sha256 = "{sha256(DOTTED.encode()).hexdigest()}" }}]
""".encode()
    }
)
TENANT = SNAPSHOT.tenants["t"]
KEY = b"k" * 32


class Clock:
    """Wall time and monotonic time that stand still until they are set."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    for module, name in ((keys_module, "time"), (tickets, "time"), (tenant_buckets, "monotonic")):
        monkeypatch.setattr(module, name, made)
    yield made


def refusal(*credentials: tuple[str, str]) -> Refused:
    with pytest.raises(Refused) as caught:
        identify(credentials, SNAPSHOT)
    return caught.value


def test_a_credential_has_at_most_4096_characters() -> None:
    assert identify([("x-api-key", LONGEST)], SNAPSHOT).tenant is TENANT
    assert identify([("authorization", f"bEARER  {LONGEST} ")], SNAPSHOT).tenant is TENANT
    unknown = refusal(("x-api-key", "unknown"))
    for value in (f"{LONGEST}k", "", "Short"):
        found = refusal(("x-api-key", value))
        assert (found.outcome, str(found)) == (Outcome.UNAUTHENTICATED, str(unknown))


def test_exactly_one_credential_is_taken() -> None:
    known = ("x-api-key", "short")
    assert identify([known], SNAPSHOT).tenant is TENANT
    assert refusal().outcome is Outcome.UNAUTHENTICATED
    assert refusal(known, known).outcome is Outcome.AMBIGUOUS_CREDENTIALS
    for scheme in ("Basic short", "short", "Oriel-Ticket short"):
        assert refusal(("authorization", scheme)).outcome is Outcome.UNAUTHENTICATED


@pytest.mark.parametrize("value", ["short", "oriel-demo-gold", "Oriel-Ticket", "Basic short"])
def test_a_key_without_bearer_is_told_the_form(value: str) -> None:
    assert str(refusal(("authorization", value))) == "the Authorization header has to be `Bearer KEY`"


@pytest.mark.parametrize(
    ("text", "token"), [("eyJ.a.b", True), ("eyJ.a", False), ("eyJ.a.b.c", False), ("eyj.a.b", False), ("a.b.c", False)]
)
def test_a_token_has_three_parts_of_which_the_first_is_an_object(text: str, token: bool) -> None:
    assert looks_like_token(text) is token


@pytest.mark.parametrize(
    ("name", "value", "asked"),
    [
        ("authorization", "eyJ.a.b", True),
        ("authorization", "a.b.c", False),
        ("authorization", "short", False),
        ("authorization", DOTTED, False),
        ("x-api-key", "eyJ.a.b", False),
        ("x-api-key", DOTTED, False),
    ],
)
def test_a_token_is_what_no_key_is_and_what_authorization_brings(name: str, value: str, asked: bool) -> None:
    verified: list[tuple[str, bytes]] = []
    of_token = ApiKey(tenant=TENANT, expires_at=None, of_token=True)

    def verify(token: str, digest: bytes) -> ApiKey | None:
        verified.append((token, digest))
        return of_token

    sent = [(name, f"Bearer {value}" if name == "authorization" else value)]
    key = SNAPSHOT.keys.get(digest := sha256(value.encode()).digest())
    if expected := of_token if asked else key:
        assert identify(sent, SNAPSHOT, verify) is expected
    else:
        with pytest.raises(Refused, match="the key or token is not valid"):
            identify(sent, SNAPSHOT, verify)
    assert verified == ([(value, digest)] if asked else [])
    if key is None:
        with pytest.raises(Refused, match="the key or token is not valid"):
            identify(sent, SNAPSHOT)


@pytest.mark.parametrize(
    ("of_token", "said"), [(True, "the token has expired"), (False, "the key or token is not valid")]
)
def test_a_key_is_over_at_its_end(clock: Clock, of_token: bool, said: str) -> None:
    key = ApiKey(tenant=TENANT, expires_at=1000.5, of_token=of_token)
    assert still_valid(key) is key
    clock.now = 1000.5
    with pytest.raises(Refused) as caught:
        still_valid(key)
    assert str(caught.value) == said
    assert still_valid(ApiKey(tenant=TENANT, expires_at=None)).tenant is TENANT


def of(request_id: str) -> list[tuple[str, str]]:
    """Return the credentials that a logic server sends for a request with four seconds left."""
    line = Tickets([KEY]).line(TENANT, request_id, 4.0)
    return [("authorization", f"Oriel-Ticket {line.split()[1]}")]


def test_a_ticket_ends_with_the_longest_answer_of_its_request_and_the_leeway_of_two_clocks(clock: Clock) -> None:
    """4 s until the answer begins, 100 s of stream, rounded up; 5 s of leeway."""
    reads, credentials = Tickets([KEY]), of("r")
    for now in (900.0, 1000.0, 1109.75):
        clock.now = now
        key = reads.identify(credentials, SNAPSHOT)
        assert (key.expires_at, key.name, key.delegated) == (1110.0, "r", True)
    clock.now = 1110.0
    with pytest.raises(Refused, match="expired"):
        reads.identify(credentials, SNAPSHOT)


def test_a_ticket_has_at_most_512_characters(clock: Clock) -> None:
    ((_, shortest),) = of("")
    fits = 512 - len(shortest.removeprefix("Oriel-Ticket "))
    assert Tickets([KEY]).identify(of("r" * fits), SNAPSHOT).name == "r" * fits
    with pytest.raises(Refused, match="not valid"):
        Tickets([KEY]).identify(of("r" * (fits + 1)), SNAPSHOT)


@pytest.mark.parametrize(
    ("count", "length", "taken"),
    [(1, 32, True), (8, 32, True), (9, 32, False), (1, 31, False), (8, 31, False), (0, 32, False)],
)
def test_there_are_1_to_8_ticket_keys_of_at_least_32_characters(
    tmp_path: Path, count: int, length: int, taken: bool
) -> None:
    file = tmp_path / "keys"
    file.write_text("\n".join(str(number) * length for number in range(count)))
    if taken:
        assert ticket_keys(file) == tuple(str(number).encode() * length for number in range(count))
        return
    with pytest.raises(StartFailed):
        ticket_keys(file)


def test_a_tenant_may_send_1000_requests_that_are_no_calls_at_once_and_100_a_second(clock: Clock) -> None:
    others = OtherRequests()
    for _ in range(1000):
        others.count(TENANT)
    with pytest.raises(Refused) as caught:
        others.count(TENANT)
    assert (caught.value.outcome, caught.value.retry_after_s) == (Outcome.RATE_LIMITED, 1)
    clock.now += 0.5
    for _ in range(49):
        others.count(TENANT)
    others.count_refused(TENANT, Refused(Outcome.QUEUE_FULL, "no request for a wrong path"))
    others.count_refused(TENANT, Refused(Outcome.NOT_FOUND, "it is the fiftieth"))
    for outcome in (Outcome.NOT_FOUND, Outcome.METHOD_NOT_ALLOWED):
        with pytest.raises(Refused, match="100 requests a second"):
            others.count_refused(TENANT, Refused(outcome, "one too many"))


def test_callers_that_are_recognised_grow_with_the_keys_up_to_a_bound() -> None:
    callers = Callers(SNAPSHOT)
    assert callers.most_known == 12
    (key, *_) = SNAPSHOT.keys.values()
    callers.snapshot = replace(SNAPSHOT, keys=dict.fromkeys(map(str, range(MOST_KNOWN)), key))
    assert callers.most_known == MOST_KNOWN
