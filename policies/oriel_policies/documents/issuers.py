"""Checks the tables of issuers: whose JSON Web Tokens are accepted, and with which public keys."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from oriel_policies.documents.promises import Issuer
from oriel_policies.documents.reading import nearest
from oriel_policies.documents.schema import IssuerTable
from oriel_policies.documents.tenants import check_pattern
from oriel_policies.errors import BadDocument

MAX_KEYS = 64
MAX_KEY_SET_BYTES = 256 * 1024
_ALGORITHMS = ("RS256", "ES256", "EdDSA")
_PRIVATE = frozenset({"d", "p", "q", "dp", "dq", "qi", "oth", "k"})


class KeySet(msgspec.Struct):
    """The outer form of a JSON Web Key Set (RFC 7517, section 5)."""

    keys: list[Any]  # a key that is no object is ignored


def issuer(
    file: str,
    path: str,
    name: str,
    table: object,
    known: Mapping[str, Issuer],
    attached: Mapping[str, bytes],
    *,
    alone: bool = True,
) -> Issuer:
    """Check one table. known: the issuers before it; attached: file name -> content of the files beside the documents.

    alone: there is no other issuer.
    Raises BadDocument.
    """
    assert isinstance(table, IssuerTable)
    if any(other.issuer == table.issuer for other in known.values()):
        raise BadDocument(file, f"{path}.issuer", "another table has this issuer: add the audiences to that table")
    if not table.audience:
        raise BadDocument(
            file, f"{path}.audience", "name at least one audience, or tokens for other services would be accepted"
        )
    wrong = [name for name in table.algorithms if name not in _ALGORITHMS]
    if wrong or not table.algorithms:
        given = ", ".join(map(repr, wrong)) or "none is given"
        raise BadDocument(file, f"{path}.algorithms", f"{given}: name one or more of {', '.join(_ALGORITHMS)}")
    if table.above_tenant and table.tier_claim is None:
        raise BadDocument(file, f"{path}.above_tenant", "above_tenant needs a tier_claim, and the issuer has none")
    if table.tenants is None and not alone:
        reason = 'there are several issuers: name the tenants that this one may speak for, such as ["team-a-*"]'
        raise BadDocument(file, f"{path}.tenants", reason)
    tenants = ["*"] if table.tenants is None else table.tenants
    if not tenants:
        raise BadDocument(file, f"{path}.tenants", "name at least one pattern, or remove the issuer")
    for pattern in tenants:
        check_pattern(file, f"{path}.tenants", pattern)
    if "://" in table.jwks:
        try:
            url = urlsplit(table.jwks)
            _ = url.port
        except ValueError as error:
            raise BadDocument(file, f"{path}.jwks", f"this is no URL: {error}") from error
        if url.scheme != "https" and not (url.scheme == "http" and url.hostname in ("127.0.0.1", "::1", "localhost")):
            raise BadDocument(file, f"{path}.jwks", "a URL has to be https (http only on this machine)")
        if "@" in url.netloc:
            raise BadDocument(file, f"{path}.jwks", "a URL with a password would be in logs: public keys need none")
        key_set = b""
    elif "/" in table.jwks or table.jwks.startswith(".") or not table.jwks.endswith(".json"):
        raise BadDocument(file, f"{path}.jwks", 'the file must lie beside the documents: give its name, as "keys.json"')
    elif table.jwks not in attached:
        reason = f"there is no file {table.jwks!r} beside the documents{nearest(table.jwks, attached)}"
        raise BadDocument(file, f"{path}.jwks", reason)
    else:
        key_set = attached[table.jwks]
        _check_key_set(table.jwks, key_set)
    return Issuer(
        name=name,
        issuer=table.issuer,
        audience=tuple(table.audience),
        jwks=table.jwks,
        algorithms=tuple(table.algorithms),
        leeway_s=table.leeway_s,
        refresh_s=table.refresh_s,
        tenant_claim=table.tenant_claim,
        tier_claim=table.tier_claim,
        tenants=tuple(tenants),
        above_tenant=table.above_tenant,
        key_set=key_set,
    )


def _check_key_set(file: str, data: bytes) -> None:
    if len(data) > MAX_KEY_SET_BYTES:
        raise BadDocument(file, "", f"a key set may have at most {MAX_KEY_SET_BYTES} bytes")
    try:
        keys = msgspec.json.decode(data, type=KeySet).keys
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadDocument(file, "", f"not a JSON Web Key Set: {error}") from error
    if not 1 <= len(keys) <= MAX_KEYS:
        raise BadDocument(file, "keys", f"a key set must have 1 to {MAX_KEYS} keys")
    for number, key in enumerate(keys):
        if isinstance(key, dict) and _PRIVATE & key.keys():
            raise BadDocument(file, f"keys[{number}]", "this is a secret or private key: only public keys belong here")
