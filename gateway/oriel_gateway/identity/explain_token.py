"""Explain outside a gateway why a token is valid or not: the gateway's own check, with the key sets that are in
files.
"""

from oriel_gateway.errors import Refused
from oriel_gateway.identity.key_sets import KeySets
from oriel_gateway.identity.tokens import Tokens
from oriel_policies.documents import ApiKey, Snapshot

_WHY = {
    "algorithm": "its algorithm is not one of its issuer's",
    "audience": "it is for another audience",
    "expired": "it has expired",
    "issuer": "no issuer of these documents has made it",
    "malformed": "it is not a well-formed token",
    "not_yet_valid": "it is not valid yet",
    "signature": "its signature is wrong",
    "tenant": "its claim names no tenant that its issuer may speak for: patterns name no tenant with scopes",
    "tier": "its claim names no tier of these documents, or one above the tenant's without above_tenant = true",
    "unknown_key": "its issuer has no such key",
}


def explain_token(snapshot: Snapshot, token: str, digest: bytes) -> tuple[ApiKey | None, str]:
    """Return the key that the token stands for, or None and the reason.

    Key sets behind a URL are not fetched: only a gateway does that.
    """
    refused: dict[str, int] = {}
    key_sets = KeySets(lambda: None)
    key_sets.adopt(snapshot.issuers.values())
    try:
        key = Tokens(snapshot, key_sets, refused).verify(token, digest)
    except Refused:
        if not refused:
            return None, "its issuer's keys are behind a URL, and only a gateway fetches them"
        key = None
    return key, ", ".join(_WHY[reason] for reason in refused)
