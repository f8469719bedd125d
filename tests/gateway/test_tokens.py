"""JSON Web Tokens at both ports, and every way to forge one."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from time import time
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from grpc import aio
from hypothesis import given, settings
from hypothesis import strategies as st
from jwt.algorithms import RSAAlgorithm
from tritonclient.utils import InferenceServerException

from oriel_gateway.core import Gateway
from oriel_gateway.errors import Refused
from oriel_gateway.identity import tokens as tokens_module
from oriel_gateway.identity.key_sets import KeySets
from oriel_gateway.identity.public_keys import parse_key_set
from oriel_gateway.identity.tokens import Tokens, explain_token
from oriel_gateway.limits import EmbeddedLimiter
from oriel_policies.documents import compile_documents
from oriel_policies.documents.packed import pack, unpack
from oriel_policies.errors import BadDocument
from oriel_wire.observe.trace import ListSink

from .gate import INFER
from .grpc_stack import Backend, infer, stack
from .stack import Client, Upstream, documents, gateway, upstream
from .tokens import AUDIENCE, ISSUER, b64, forged, issuer_table, jwk, key_set, pem, private, token

ALL = [jwk(algorithm) for algorithm in ("RS256", "ES256", "EdDSA")]


def files(port: int = 1, *keys: dict[str, Any], **more: str) -> dict[str, bytes]:
    return {**documents([port], extra=issuer_table(**more)), "keys.json": key_set(*(keys or ALL))}


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


async def core(**more: str) -> Gateway:
    return Gateway(compile_documents(files(**more)), limiter=EmbeddedLimiter(), sink=ListSink())


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
async def test_a_token_works_like_a_key_over_http(up: Upstream, algorithm: str) -> None:
    async with gateway(files(up.port)) as (port, gate), Client(port) as client:
        mine = token(algorithm, tenant="b")
        for _ in range(4):
            assert (await client.ask(INFER, key=mine)).status == 200
        assert up.seen[-1].get("x-oriel-tenant") == "b" and up.seen[-1].get("x-oriel-tier") == "bronze"
        assert all(mine not in seen.head and "authorization" not in seen.head.lower() for seen in up.seen)
        assert (await client.ask("/v2/models/other/infer", key=mine)).status == 404
        assert not gate.tokens_refused


async def test_a_token_works_like_a_key_over_grpc() -> None:
    backend = Backend()
    async with stack(backend, files=files) as (address, _):
        await infer(address, "digits", token(tenant="b"))
        metadata = backend.seen[0][2]
        assert metadata["x-oriel-tenant"] == "b" and "authorization" not in metadata
        with pytest.raises(InferenceServerException) as caught:
            await infer(address, "digits", token(tenant="b") + "x")
        assert caught.value.status() == "StatusCode.UNAUTHENTICATED"


async def test_a_known_token_is_not_verified_again(up: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known token costs as much as a key: its header line is recognised by its hash."""
    async with gateway(files(up.port)) as (port, gate), Client(port) as client, Client(port) as other:
        mine = token()
        assert (await client.ask(INFER, key=mine)).status == 200
        monkeypatch.setattr(tokens_module.jwt, "decode", None)
        for _ in range(3):
            assert (await client.ask(INFER, key=mine)).status == 200
        assert gate.callers.of([("authorization", f"Bearer {mine}")]).tenant.name == "g"
        monkeypatch.setattr("oriel_gateway.identity.callers.identify", None)
        assert (await other.ask(INFER, key=mine)).status == 200


async def test_a_claim_lowers_the_tier_where_the_documents_name_it(up: Upstream) -> None:
    async with gateway(files(up.port, tier_claim='"tier"')) as (port, gate), Client(port) as client:
        assert (await client.ask(INFER, key=token(tenant="g", tier="bronze"))).status == 200
        assert up.seen[-1].get("x-oriel-tier") == "bronze" and up.seen[-1].get("x-oriel-tenant") == "g"
        assert (await client.ask(INFER, key=token(tenant="g", tier="gold"))).status == 200
        assert (await client.ask(INFER, key=token(tenant="b", tier="gold"))).status == 401
        assert gate.tokens_refused == {"tier": 1}
        found, why = explain_token(gate.snapshot, token(tenant="b", tier="gold"), b"")
        assert found is None and "above_tenant = true" in why
    with pytest.raises(BadDocument, match="above_tenant needs a tier_claim"):
        compile_documents(files(above_tenant="true"))


async def test_a_claim_may_name_a_tier_above_the_tenants_only_where_the_documents_say_so(up: Upstream) -> None:
    more = {"tier_claim": '"tier"', "above_tenant": "true"}
    async with gateway(files(up.port, **more)) as (port, gate), Client(port) as client:
        assert (await client.ask(INFER, key=token(tenant="b", tier="gold"))).status == 200
        assert up.seen[-1].get("x-oriel-tier") == "gold" and up.seen[-1].get("x-oriel-tenant") == "b"
        assert (await client.ask(INFER, key=token(tenant="b"))).status == 200
        assert up.seen[-1].get("x-oriel-tier") == "bronze"
        assert (await client.ask(INFER, key=token(tenant="b", tier="platinum"))).status == 401
        assert gate.tokens_refused == {"tier": 1}
        one, two = (
            gate.callers.of([("authorization", f"Bearer {token(tenant='b', tier='gold', n=n)}")]) for n in (1, 2)
        )
        assert one.tenant is two.tenant  # what is remembered of a tenant is found by the object's identity
    async with gateway(files(up.port)) as (port, _), Client(port) as client:
        assert (await client.ask(INFER, key=token(tenant="b", tier="gold"))).status == 200
        assert up.seen[-1].get("x-oriel-tier") == "bronze"


async def test_other_claims_names_and_audiences() -> None:
    gate = await core(tenant_claim='"https://oriel/tenant"')
    bearer = token(tenant=None, **{"https://oriel/tenant": "b"}, aud=["x", "other"])
    assert gate.callers.of([("authorization", f"Bearer {bearer}")]).tenant.name == "b"


DEEP, NUMBER = b'{"alg":"ES256"' + b"[" * 900, b'{"iss":1}'
FORGED: list[tuple[str, Callable[[], str]]] = [
    ("expired", lambda: token(exp=1_700_000_000)),
    ("not_yet_valid", lambda: token(nbf=4_000_000_000)),
    ("audience", lambda: token(aud="somebody else")),
    ("malformed", lambda: token(aud=None)),
    ("malformed", lambda: token(exp=None)),
    ("malformed", lambda: token(exp="soon")),
    ("issuer", lambda: token(iss="https://evil.example")),
    ("malformed", lambda: token(iss=None)),
    ("malformed", lambda: forged({"alg": "ES256", "kid": "ES256-0"}, iss=["https://login.example"])),
    ("tenant", lambda: token(tenant="nobody")),
    ("tenant", lambda: token(tenant=None)),
    ("tenant", lambda: token(tenant={"name": "g"})),
    ("signature", lambda: token(number=1, header={"kid": "ES256-0"})),
    ("signature", lambda: token()[:-4] + "AAAA"),
    ("signature", lambda: ".".join([*token().split(".")[:1], *token(tenant="b").split(".")[1:2], "A" * 86])),
    ("unknown_key", lambda: token(number=1)),
    ("unknown_key", lambda: token(header={"kid": "RS256-0"})),  # a key of another algorithm
    ("unknown_key", lambda: token(header={"kid": "../../etc/passwd"})),
    ("malformed", lambda: token(header={"crit": ["exp"]})),
    ("malformed", lambda: forged({"alg": "ES256", "kid": 5})),
    # alg: none, in every spelling
    *[("algorithm", lambda alg=alg: forged({"alg": alg, "kid": "ES256-0"})) for alg in ("none", "None", "nOnE", "")],
    # key confusion: the public key as the secret of an HMAC
    ("algorithm", lambda: forged({"alg": "HS256", "kid": "RS256-0"}, pem("RS256"))),
    ("algorithm", lambda: forged({"alg": "HS256"}, json.dumps(jwk("RS256")).encode())),
    ("unknown_key", lambda: forged({"alg": "RS256", "kid": "ES256-0"}, pem("RS256"))),
    ("signature", lambda: forged({"alg": "RS256", "kid": "RS256-0"}, pem("RS256"))),
    # a key that the token itself names, which is never fetched
    ("signature", lambda: token(number=1, header={"kid": "ES256-0", "jwk": jwk("ES256", 1)})),
    ("signature", lambda: token(number=1, header={"kid": None, "jku": "https://evil.example/keys"})),
    ("malformed", lambda: "eyJ.eyJ."),
    ("malformed", lambda: f"{b64(DEEP)}.{b64(b'{}')}.x"),
    ("malformed", lambda: f"eyJ{'A' * 100}.{b64(NUMBER)}.{'A' * 40}"),
]  # fmt: skip


UNKNOWN = (("www-authenticate", 'Bearer realm="oriel"'),)  # the answer to an unknown key
OWN_FAULTS = {
    "expired": "the token has expired",
    "not_yet_valid": "the token is not valid yet",
    "audience": "the token is for another audience",
}


@pytest.mark.parametrize(("reason", "make"), FORGED)
async def test_a_bad_token_is_told_no_more_than_its_issuers_signature_vouches_for(
    reason: str, make: Callable[[], str]
) -> None:
    """The holder of a token that its issuer has signed learns that its time or audience is wrong; all others learn
    nothing.
    """
    gate = await core()
    with pytest.raises(Refused) as caught:
        gate.callers.of([("authorization", f"Bearer {make()}")])
    assert caught.value.outcome.value == "unauthenticated"
    why = OWN_FAULTS.get(reason)
    assert caught.value.message == (why or "the key or token is not valid")
    detail = (("www-authenticate", f'Bearer realm="oriel", error="invalid_token", error_description="{why}"'),)
    assert caught.value.headers == (detail if why else UNKNOWN)
    assert gate.tokens_refused == {reason: 1}


@pytest.mark.parametrize("wrong", [{"exp": 1_700_000_000}, {"aud": "somebody else"}, {"nbf": 4_000_000_000}])
async def test_a_fault_is_named_only_under_a_good_signature_and_names_no_tenant(wrong: dict[str, Any]) -> None:
    gate = await core()
    forgeries = [token(number=1, header={"kid": "ES256-0"}, **wrong), token(number=1, **wrong), "key-of-nobody"]
    for forgery in [*forgeries, "old"]:  # the last is a stored key that has expired
        with pytest.raises(Refused) as caught:
            gate.callers.of([("authorization", f"Bearer {forgery}")])
        assert (caught.value.message, caught.value.headers) == ("the key or token is not valid", UNKNOWN)
    said = set()
    for tenant in ("g", "b", "nobody"):
        with pytest.raises(Refused) as caught:
            gate.callers.of([("authorization", f"Bearer {token(tenant=tenant, **wrong)}")])
        said.add((caught.value.message, caught.value.headers))
    assert len(said) == 1


@pytest.mark.parametrize(
    ("wrong", "why"), [({"exp": 1_700_000_000}, "expired"), ({"aud": "somebody else"}, "audience")]
)
async def test_rfc_6750_names_the_fault_on_both_ports(up: Upstream, wrong: dict[str, Any], why: str) -> None:
    async with gateway(files(up.port)) as (port, _), Client(port) as client:
        reply = await client.ask(INFER, key=token(**wrong))
        assert reply.status == 401 and json.loads(reply.body)["error"] == OWN_FAULTS[why]
        challenge = f'Bearer realm="oriel", error="invalid_token", error_description="{OWN_FAULTS[why]}"'
        assert reply.headers["www-authenticate"] == challenge and up.seen == []
        reply = await client.ask(INFER, key="nobody")
        assert reply.status == 401 and reply.headers["www-authenticate"] == 'Bearer realm="oriel"'
    async with stack(Backend(), files=files) as (address, _):
        with pytest.raises(InferenceServerException) as caught:
            await infer(address, "digits", token(**wrong))
        assert caught.value.status() == "StatusCode.UNAUTHENTICATED" and caught.value.message() == OWN_FAULTS[why]
        async with aio.insecure_channel(address) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(
                b"", metadata=(("authorization", f"Bearer {token(**wrong)}"),)
            )
            assert dict(await call.trailing_metadata())["www-authenticate"] == challenge


@pytest.mark.parametrize(
    "name",
    [["g"], {"g": 1}, 1, 1.5, True, "G", "g ", "\uff47", "g\u0000", "\ud800", "\udcff", "", "x" * 1000, "../g", "g\n"],
)
async def test_a_claim_that_is_not_exactly_a_tenants_name_is_nobodys(name: Any) -> None:
    """Values keep their case and spaces, and only text is looked up. JSON can contain a lone surrogate, UTF-8
    cannot.
    """
    snapshot = unpack(memoryview(pack(compile_documents(files()))))
    gate = Gateway(snapshot, limiter=EmbeddedLimiter(), sink=ListSink())
    with pytest.raises(Refused) as caught:
        gate.callers.of([("authorization", f"Bearer {token(tenant=name)}")])
    assert caught.value.outcome.value == "unauthenticated"
    lone = isinstance(name, str) and any("\ud800" <= letter <= "\udfff" for letter in name)
    assert gate.tokens_refused == {"malformed" if lone else "tenant": 1}


async def test_an_issuer_speaks_for_the_tenants_it_is_trusted_with() -> None:
    """Otherwise each of two issuers could make tokens for the tenants of the other."""
    gate = await core(tenants='["b*", "x"]')
    assert gate.callers.of([("authorization", f"Bearer {token(tenant='b')}")]).tenant.name == "b"
    found, why = explain_token(gate.snapshot, token(), b"")
    assert found is None and why.startswith("its claim names no tenant that its issuer may speak for")
    again = unpack(memoryview(pack(gate.snapshot)))
    assert again.issuers["login"].tenants == ("b*", "x")
    for wrong in ("[]", '["a b"]'):
        with pytest.raises(BadDocument, match="tenants"):
            compile_documents(files(tenants=wrong))


@pytest.mark.parametrize(("tenants", "counts"), [(None, False), ('["*"]', False), ('["g*"]', False), ('["g"]', True)])
async def test_a_tenant_with_scopes_is_named_by_tokens_only_if_its_issuer_names_it_exactly(
    tenants: str | None, counts: bool
) -> None:
    """Each token's issuer could have it name an operator, because patterns, and none at all, covered every tenant."""
    found = files(**({} if tenants is None else {"tenants": tenants}))
    found["all.toml"] = found["all.toml"].replace(b"[tenants.g]", b'[tenants.g]\nscopes = ["operator"]')
    gate = Gateway(compile_documents(found), limiter=EmbeddedLimiter(), sink=ListSink())
    try:
        named = gate.callers.of([("authorization", f"Bearer {token(tenant='g')}")]).tenant.name
    except Refused:
        named = ""
    assert named == ("g" if counts else "")


def test_each_of_several_issuers_names_its_tenants() -> None:
    second = issuer_table().replace("[issuers.login]", "[issuers.second]").replace(ISSUER, "https://second.example")
    found = {**files(tenants='["g"]'), "second.toml": second.encode()}
    with pytest.raises(BadDocument, match=r"issuers.second.tenants: there are several issuers: name the tenants"):
        compile_documents(found)
    found["second.toml"] = f'{second}\ntenants = ["b"]\n'.encode()
    assert compile_documents(found).issuers["second"].tenants == ("b",)


async def test_a_token_that_never_ends_or_ended_long_ago_is_judged_as_one() -> None:
    gate = await core()
    for exp in (10**12, 4e9, "4000000000"):
        key = gate.callers.of([("authorization", f"Bearer {token(exp=exp)}")])
        assert key.expires_at is not None and key.expires_at > time()
    for exp in (float("inf"), float("nan"), -1, 0, True, [], {}, "", "1e99", 10**400):
        with pytest.raises(Refused):
            gate.callers.of([("authorization", f"Bearer {token(exp=exp)}")])


async def test_clocks_may_differ_by_the_leeway() -> None:
    gate = await core()
    now = int(time())
    for late in (token(exp=now - 30), token(nbf=now + 30), token(iat=now + 30)):
        assert gate.callers.of([("authorization", f"Bearer {late}")]).tenant.name == "g"


async def test_a_token_ends_on_an_open_connection(up: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(files(up.port, leeway_s="0")) as (port, _), Client(port) as client:
        mine = token(exp=int(time()) + 100)
        for _ in range(3):
            assert (await client.ask(INFER, key=mine)).status == 200
        monkeypatch.setattr("oriel_gateway.identity.keys.time", lambda: time() + 101)
        late = await client.ask(INFER, key=mine)
        assert late.status == 401 and 'error_description="the token has expired"' in late.headers["www-authenticate"]


async def test_a_token_is_a_bearer_not_a_key(up: Upstream) -> None:
    async with gateway(files(up.port)) as (port, _), Client(port) as client:
        assert (await client.ask(INFER, key=None, headers=f"x-api-key: {token()}\r\n")).status == 401
        reply = await client.ask(INFER, key=token(), headers="x-api-key: key-gold\r\n")
        assert reply.status == 400 and json.loads(reply.body)["reason"] == "ambiguous_credentials"


async def test_new_documents_forget_tokens(up: Upstream) -> None:
    async with gateway(files(up.port)) as (port, gate), Client(port) as client:
        mine = token()
        for _ in range(3):
            assert (await client.ask(INFER, key=mine)).status == 200
        gate.adopt(compile_documents(files(up.port, jwk("ES256", 1))))
        assert (await client.ask(INFER, key=mine)).status == 401
        gate.adopt(compile_documents(files(up.port)))
        assert (await client.ask(INFER, key=mine)).status == 200
        gate.adopt(compile_documents(documents([up.port])))
        assert gate.callers.tokens is None and (await client.ask(INFER, key=mine)).status == 401


async def test_without_an_id_the_only_key_of_the_algorithm_is_taken() -> None:
    gate = await core()
    assert gate.callers.of([("authorization", f"Bearer {token(header={'kid': None})}")]).tenant.name == "g"
    snapshot = compile_documents(files(1, *ALL, jwk("ES256", 1)))
    gate = Gateway(snapshot, limiter=EmbeddedLimiter(), sink=ListSink())
    found, why = explain_token(snapshot, token(header={"kid": None}), b"")
    assert found is None and why == "its issuer has no such key"


def test_only_plain_public_keys_for_signatures_count() -> None:
    good = jwk("ES256")
    secret = json.loads(RSAAlgorithm.to_jwk(private("RS256")))
    small = json.loads(RSAAlgorithm.to_jwk(rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key()))
    wide = {**jwk("RS256"), "e": b64((2**65 + 1).to_bytes(9, "big"))}
    bad: list[dict[str, Any]] = [
        {**good, "use": "enc"},
        {**good, "key_ops": ["sign"]},
        {**good, "key_ops": "verify"},
        {**good, "alg": "HS256"},
        {**good, "crv": "P-521"},
        {**good, "x": b64(b"\x01" * 32)},  # not on the curve
        {**good, "kid": 7},
        {"kty": "oct", "k": "c2VjcmV0", "kid": "x"},
        {"kty": "OKP", "crv": "Ed25519", "x": "AA"},
        {},
        secret,
        small,
        wide,
    ]
    assert [key.kid for key in parse_key_set(key_set(good, *bad), ["RS256", "ES256", "EdDSA"])] == ["ES256-0"]
    assert parse_key_set(key_set(good), ["RS256"]) == ()
    for data in (b"", b"[]", b'{"keys": 5}', b"\xff"):
        with pytest.raises(ValueError):
            parse_key_set(data, ["ES256"])


@pytest.mark.parametrize(
    ("bits", "exponent_bits", "taken"),
    [(2048, 2, True), (2047, 17, False), (8192, 64, True), (8193, 17, False), (2048, 65, False)],
)
def test_a_key_of_rsa_has_2048_to_8192_bits_and_an_exponent_of_at_most_64(
    bits: int, exponent_bits: int, taken: bool
) -> None:
    modulus, exponent = ((1 << (size - 1)) + 1 for size in (bits, exponent_bits))
    words = {"n": b64(modulus.to_bytes(1025, "big").lstrip(b"\0")), "e": b64(exponent.to_bytes(9, "big").lstrip(b"\0"))}
    found = parse_key_set(key_set({"kty": "RSA", "kid": "a", **words}), ["RS256"])
    assert [key.kid for key in found] == ["a"] * taken


def test_a_set_has_at_most_64_keys() -> None:
    found = parse_key_set(key_set(*[jwk("ES256")] * 64), ["ES256"])
    assert len(found) == 64
    with pytest.raises(ValueError, match="more than 64 keys"):
        parse_key_set(key_set(*[jwk("ES256")] * 65), ["ES256"])


async def test_two_generations_of_tokens_are_remembered_and_one_that_is_used_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a bound of two: a token that was used in the generation before this one is known, one used earlier is not."""
    gate = await core()
    tokens = gate.callers.tokens
    assert tokens is not None and tokens.max_young == 8192
    tokens.max_young = 2
    verified: list[str] = []
    verify = tokens._verify
    monkeypatch.setattr(tokens, "_verify", lambda text: verified.append(text) or verify(text))
    mine = [token("EdDSA", n=n) for n in range(4)]
    for number in (0, 1, 2, 0, 3, 0, 1):
        gate.callers.of([("authorization", f"Bearer {mine[number]}")])
    assert [mine.index(each) for each in verified] == [0, 1, 2, 3, 1]
    assert {len(digest) for digest in (*tokens._young, *tokens._old)} == {32}, "no token is kept, only its hash"


def test_explain_knows_tokens() -> None:
    snapshot = compile_documents(files())
    found, _ = explain_token(snapshot, token(), b"")
    assert found is not None and found.tenant.name == "g" and found.name == "token of login"
    assert explain_token(snapshot, token(aud="x"), b"1") == (None, "it is for another audience")
    assert AUDIENCE == "oriel"


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)
PART = st.one_of(st.text(max_size=20), JSON.map(lambda value: b64(json.dumps(value).encode())))


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["alg", "kid", "typ", "crit", "b64", "jwk"]), JSON, max_size=4),
    st.dictionaries(st.sampled_from(["iss", "aud", "exp", "nbf", "iat", "tenant", "jti", "sub"]), JSON, max_size=6),
    st.booleans(),
    PART,
)
def test_whatever_is_sent_as_a_token_is_refused(
    header: dict[str, Any], payload: dict[str, Any], signed: bool, rest: str
) -> None:
    """A true signature does not help: what an issuer signs may be nonsense, and must end in a refusal and nothing
    worse.
    """
    from oriel_gateway.identity.keys import identify

    if signed:
        header = {**header, "alg": "EdDSA", "kid": "EdDSA-0"}
        header.pop("crit", None)
        payload = {"iss": "https://login.example", "aud": "oriel", "exp": int(time()) + 300, "tenant": "g", **payload}
    body = f"{b64(json.dumps(header).encode())}.{b64(json.dumps(payload).encode())}"
    text = f"{body}.{b64(private('EdDSA').sign(body.encode()))}" if signed else f"{body}.{rest}"
    try:
        key = identify([("authorization", f"Bearer {text}")], SNAPSHOT, Tokens(SNAPSHOT, KEYS, {}).verify)
    except Refused as refused:
        assert refused.outcome.value == "unauthenticated"
    else:
        assert signed and key.tenant.name in ("g", "b", "limited") and key.expires_at is not None


SNAPSHOT = compile_documents(files())
KEYS = KeySets(lambda: None)
KEYS.adopt(SNAPSHOT.issuers.values())


def test_who_uses_no_tokens_does_not_pay_for_them() -> None:
    check = "import sys, oriel_gateway.app; print([m for m in ('jwt', 'cryptography', 'httpx') if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
