"""JSON Web Tokens (RFC 7519) as credentials: verified once, and then known by their SHA-256 like any key.

The token's own `iss`, which proves nothing yet, finds the issuer; the algorithm has to be one of that issuer's and the
one its key is for. Then PyJWT verifies the signature, issuer, audience and times. A wrong time or audience is shown to
the client (`keys.TOKEN_FAULTS`); for any other fault the client gets the answer of an unknown key. The count by reason
is for the operator.
"""

from base64 import urlsafe_b64decode
from typing import Any

import jwt
import msgspec

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.identity.key_sets import KeySets
from oriel_gateway.identity.keys import TOKEN_FAULTS, refused_token
from oriel_gateway.identity.public_keys import PublicKey
from oriel_policies.documents import ApiKey, Issuer, Snapshot, Tenant
from oriel_policies.documents.promises import served_by

TOKENS = 8192
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


class _Header(msgspec.Struct):
    alg: str
    kid: str | None = None
    crit: Any = None


class _Payload(msgspec.Struct):
    iss: str


class _Refused(Exception):
    """A token is not valid. The one argument is the reason as the metric names it."""


class Tokens:
    """The verified tokens of one snapshot.

    refused: counts by reason, which outlive the snapshot.
    max_young: tokens in each of the two generations that are remembered.
    """

    def __init__(self, snapshot: Snapshot, key_sets: KeySets, refused: dict[str, int]) -> None:
        self._snapshot = snapshot
        self._key_sets = key_sets
        self._refused = refused
        self.max_young = TOKENS
        self._issuers = {issuer.issuer: issuer for issuer in snapshot.issuers.values()}
        self._young: dict[bytes, ApiKey] = {}
        self._old: dict[bytes, ApiKey] = {}

    def verify(self, token: str, digest: bytes) -> ApiKey | None:
        """Return the key that the token stands for, with its end; None if the token is not valid. digest: its
        SHA-256.

        Raises Refused IDENTITY_UNAVAILABLE while the issuer's keys are not available, or UNAUTHENTICATED for a fault
        that is shown to the token's holder.
        """
        found = self._young.get(digest)
        if found is None:
            found = self._old.get(digest)
            if found is None:
                try:
                    found = self._verify(token)
                except _Refused as refused:
                    reason = str(refused)
                    self._refused[reason] = self._refused.get(reason, 0) + 1
                    if reason in TOKEN_FAULTS:
                        raise refused_token(reason) from None
                    return None
            if len(self._young) >= self.max_young:
                self._old, self._young = self._young, {}
            self._young[digest] = found
        return found

    def forget(self) -> None:
        """Forget all verified tokens because keys were replaced."""
        self._young, self._old = {}, {}

    def _verify(self, token: str) -> ApiKey:
        header, issuer = self._peek(token)
        keys = self._key_sets.keys(issuer)
        if keys is None:
            raise Refused(
                Outcome.IDENTITY_UNAVAILABLE, "the keys of this token's issuer are not available now", retry_after_s=1
            )
        key = _choose(keys, header)
        if key is None:
            wait_s = self._key_sets.wait_for(issuer, header.kid)
            if wait_s:
                why = "the keys of this token's issuer are being read again, because it names a new one"
                raise Refused(Outcome.IDENTITY_UNAVAILABLE, why, retry_after_s=wait_s)
            raise _Refused("unknown_key")
        try:
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[key.algorithm],
                audience=list(issuer.audience),
                issuer=issuer.issuer,
                leeway=issuer.leeway_s,
                options={"require": ["exp", "iss", "aud"]},
            )
            until = float(claims["exp"]) + issuer.leeway_s
        except jwt.ExpiredSignatureError:
            raise _Refused("expired") from None
        except jwt.ImmatureSignatureError:
            raise _Refused("not_yet_valid") from None
        except jwt.InvalidAudienceError:
            raise _Refused("audience") from None
        except jwt.InvalidSignatureError:
            raise _Refused("signature") from None
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            raise _Refused("malformed") from None
        tenant = self._tenant(issuer, claims)
        return ApiKey(tenant=tenant, expires_at=until, name=f"token of {issuer.name}", of_token=True)

    def _peek(self, token: str) -> tuple[_Header, Issuer]:
        """Return the token's header and issuer before anything is verified."""
        first, second, _ = token.split(".")
        try:
            header = msgspec.json.decode(_bytes(first), type=_Header)
            issuer = self._issuers.get(msgspec.json.decode(_bytes(second), type=_Payload).iss)
        except (ValueError, msgspec.DecodeError, RecursionError):
            raise _Refused("malformed") from None
        if issuer is None:
            raise _Refused("issuer")
        if header.alg not in issuer.algorithms:
            raise _Refused("algorithm")
        if header.crit is not None:  # an extension that the gateway does not support
            raise _Refused("malformed")
        return header, issuer

    def _tenant(self, issuer: Issuer, claims: dict[str, Any]) -> Tenant:
        name = claims.get(issuer.tenant_claim)
        tenant = self._snapshot.tenants.get(name) if isinstance(name, str) else None
        if tenant is None or not tenant.named_by(issuer.tenants):
            raise _Refused("tenant")
        wanted = claims.get(issuer.tier_claim) if issuer.tier_claim is not None else None
        if wanted is None or wanted == tenant.tier.name:
            return tenant
        tier = self._snapshot.tiers.get(wanted) if isinstance(wanted, str) else None
        if tier is None or (tier.above(tenant.tier) and not issuer.above_tenant):
            raise _Refused("tier")
        return served_by(tenant, tier, self._snapshot.served)


def explain_token(snapshot: Snapshot, token: str, digest: bytes) -> tuple[ApiKey | None, str]:
    """Return the key that the token stands for, or None and the reason, outside a gateway.

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


def _choose(keys: tuple[PublicKey, ...], header: _Header) -> PublicKey | None:
    """Return the key that a token names; without a name the only one of its algorithm."""
    fitting = [key for key in keys if key.algorithm == header.alg]
    if header.kid is not None:
        fitting = [key for key in fitting if key.kid == header.kid]
    return fitting[0] if len(fitting) == 1 else None


def _bytes(part: str) -> bytes:
    return urlsafe_b64decode(part + "=" * (-len(part) % 4))
