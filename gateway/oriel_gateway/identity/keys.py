"""Identify callers by API keys, of which only the SHA-256 is known, and by tokens of the documents' issuers."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from time import time

from oriel_gateway.errors import Outcome, Refused
from oriel_policies.documents import ApiKey, Snapshot

_MAX_CREDENTIAL = 4096
# The faults of a token that its holder learns: those that are found once its issuer's signature is proven. An answer
# never shows whether an issuer, a key or a tenant exists.
TOKEN_FAULTS = {
    "audience": "the token is for another audience",
    "expired": "the token has expired",
    "not_yet_valid": "the token is not valid yet",
}


# Returns the key that a token with this SHA-256 stands for, None if it is not valid; see `tokens.Tokens.verify`.
Verify = Callable[[str, bytes], ApiKey | None]


def identify(credentials: Sequence[tuple[str, str]], snapshot: Snapshot, verify: Verify | None = None) -> ApiKey:
    """Return the key that the one credential of a request stands for.

    credentials: pairs of lower-case header name and value: `authorization: Bearer KEY` or `x-api-key: KEY`. A token is
    accepted only as `authorization`.
    verify: verifies tokens; None if the documents name no issuers.
    Raises Refused UNAUTHENTICATED for no credential, or an unknown or expired one: with the same text for all, so that
    no answer shows which keys exist; but a signed token gets one of `TOKEN_FAULTS`. Raises AMBIGUOUS_CREDENTIALS for
    two credentials, and IDENTITY_UNAVAILABLE for a token while the keys of its issuer are not available.
    """
    if not credentials:
        raise unauthenticated("this needs an API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")
    if len(credentials) > 1:
        raise Refused(Outcome.AMBIGUOUS_CREDENTIALS, "the request carries two credentials; send exactly one")
    name, value = credentials[0]
    if name == "authorization":
        scheme, _, value = value.partition(" ")
        if value and scheme.lower().startswith("oriel-"):
            raise unauthenticated("a call on behalf of another tenant needs a ticket and the gateway's internal port")
        if scheme.lower() != "bearer":
            raise unauthenticated("the Authorization header has to be `Bearer KEY`")
        value = value.strip()
    if not value or len(value) > _MAX_CREDENTIAL:
        raise unauthenticated("the key or token is not valid")
    digest = sha256(value.encode("utf-8", "surrogateescape")).digest()
    key = snapshot.keys.get(digest)
    if key is None and verify is not None and name == "authorization" and looks_like_token(value):
        key = verify(value, digest)
    if key is None:
        raise unauthenticated("the key or token is not valid")
    return still_valid(key)


def looks_like_token(credential: str) -> bool:
    """Return whether a credential has three parts between dots, the first of which begins as the base64 of `{"`."""
    return credential.startswith("eyJ") and credential.count(".") == 2


def still_valid(key: ApiKey) -> ApiKey:
    """Return the key. Raises Refused UNAUTHENTICATED if it has expired."""
    if key.expires_at is not None and key.expires_at <= time():
        raise refused_token("expired") if key.of_token else unauthenticated("the key or token is not valid")
    return key


def refused_token(fault: str) -> Refused:
    """Build the refusal of a signed token according to RFC 6750, section 3.1. fault: one of `TOKEN_FAULTS`."""
    message = TOKEN_FAULTS[fault]
    challenge = f'Bearer realm="oriel", error="invalid_token", error_description="{message}"'
    return Refused(Outcome.UNAUTHENTICATED, message, headers=(("www-authenticate", challenge),))


def unauthenticated(message: str) -> Refused:
    """Build the refusal of a request whose sender is not known."""
    return Refused(Outcome.UNAUTHENTICATED, message, headers=(("www-authenticate", 'Bearer realm="oriel"'),))
