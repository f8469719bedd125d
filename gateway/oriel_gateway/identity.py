"""Who asks: API keys, known only by their SHA-256, and tokens of the issuers the documents name."""

from collections.abc import Sequence
from hashlib import sha256
from time import time
from typing import TYPE_CHECKING

from oriel_gateway.errors import Outcome, Refused
from oriel_policies.documents import ApiKey, Snapshot

if TYPE_CHECKING:
    from oriel_gateway.tokens import Tokens

__all__ = ["TOKEN_FAULTS", "identify", "looks_like_token", "refused_token", "still_valid"]

_MAX_CREDENTIAL = 4096
# The faults that a token's holder is told: those that are found only once its issuer's signature is proven. Whether
# there is such an issuer, key or tenant is never told.
TOKEN_FAULTS = {
    "audience": "the token is for another audience",
    "expired": "the token has expired",
    "not_yet_valid": "the token is not valid yet",
}


def identify(credentials: Sequence[tuple[str, str]], snapshot: Snapshot, tokens: "Tokens | None" = None) -> ApiKey:
    """What the one credential in `credentials`, (lower-case header name, value) pairs, stands for.

    `authorization: Bearer KEY` or `x-api-key: KEY`; a token only as the former. Raises Refused: none, an unknown or an
    expired one is UNAUTHENTICATED (the same words for all, so that nobody learns which keys exist; but a signed token
    gets one of `TOKEN_FAULTS`); two are AMBIGUOUS_CREDENTIALS; a token whose issuer's keys are not here is
    IDENTITY_UNAVAILABLE.
    """
    if not credentials:
        raise _unauthenticated("this needs an API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")
    if len(credentials) > 1:
        raise Refused(Outcome.AMBIGUOUS_CREDENTIALS, "the request carries two credentials; send exactly one")
    name, value = credentials[0]
    if name == "authorization":
        scheme, _, value = value.partition(" ")
        if scheme.lower() != "bearer":
            raise _unauthenticated("the Authorization header has to be `Bearer KEY`")
        value = value.strip()
    if not value or len(value) > _MAX_CREDENTIAL:
        raise _unauthenticated("the key or token is not valid")
    digest = sha256(value.encode("utf-8", "surrogateescape")).digest()
    key = snapshot.keys.get(digest)
    if key is None and tokens is not None and name == "authorization" and looks_like_token(value):
        key = tokens.verify(value, digest)
    if key is None:
        raise _unauthenticated("the key or token is not valid")
    return still_valid(key)


def looks_like_token(credential: str) -> bool:
    """Three parts between dots, the first of which begins as base64 of `{"`."""
    return credential.startswith("eyJ") and credential.count(".") == 2


def still_valid(key: ApiKey) -> ApiKey:
    """The key itself. Raises Refused when it has expired."""
    if key.expires_at is not None and key.expires_at <= time():
        raise refused_token("expired") if key.of_token else _unauthenticated("the key or token is not valid")
    return key


def refused_token(fault: str) -> Refused:
    """The refusal of a signed token, as RFC 6750 section 3.1 has it. fault: one of `TOKEN_FAULTS`."""
    message = TOKEN_FAULTS[fault]
    challenge = f'Bearer realm="oriel", error="invalid_token", error_description="{message}"'
    return Refused(Outcome.UNAUTHENTICATED, message, headers=(("www-authenticate", challenge),))


def _unauthenticated(message: str) -> Refused:
    return Refused(Outcome.UNAUTHENTICATED, message, headers=(("www-authenticate", 'Bearer realm="oriel"'),))
