"""Convert JSON Web Keys to public keys that may verify a token. Any key that is not clearly such a key is left out.

A key is for exactly one algorithm, given by its type: a token cannot make an RSA key count as the secret of an HMAC,
and no key has the algorithm `none`. Bounds keep a published key from costing more to use than a signature should.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from jwt.exceptions import PyJWTError

from oriel_policies.documents.issuers import MAX_KEYS, KeySet

_MIN_RSA_BITS, _MAX_RSA_BITS, _MAX_EXPONENT_BITS = 2048, 8192, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicKey:
    """A public key for one algorithm. kid: "" if the key has no id. key: the public key in the form that PyJWT
    takes.
    """

    kid: str
    algorithm: str
    key: Any


def parse_key_set(data: bytes, algorithms: Iterable[str]) -> tuple[PublicKey, ...]:
    """Return the keys of a JWK set that may verify tokens by one of `algorithms`. Raises ValueError if it is no key
    set.
    """
    try:
        keys = msgspec.json.decode(data, type=KeySet).keys
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError("it is not a JSON Web Key Set") from error
    if len(keys) > MAX_KEYS:
        raise ValueError(f"more than {MAX_KEYS} keys")
    wanted = frozenset(algorithms)
    found = [_public_key(each) for each in keys if isinstance(each, dict)]
    return tuple(key for key in found if key is not None and key.algorithm in wanted)


def _public_key(jwk: Mapping[str, Any]) -> PublicKey | None:
    kid = jwk.get("kid", "")
    if not isinstance(kid, str) or "d" in jwk or jwk.get("use", "sig") != "sig":
        return None
    operations = jwk.get("key_ops", ["verify"])
    if not isinstance(operations, list) or "verify" not in operations:
        return None
    parse: Any
    match jwk.get("kty"), jwk.get("crv"):
        case "RSA", _:
            algorithm, parse = "RS256", RSAAlgorithm.from_jwk
        case "EC", "P-256":
            algorithm, parse = "ES256", ECAlgorithm.from_jwk
        case "OKP", "Ed25519":
            algorithm, parse = "EdDSA", OKPAlgorithm.from_jwk
        case _:
            return None
    if jwk.get("alg", algorithm) != algorithm:
        return None
    try:
        key = parse(dict(jwk))
    except (PyJWTError, UnsupportedAlgorithm, ValueError, TypeError, KeyError):
        return None
    if isinstance(key, RSAPublicKey) and not (
        _MIN_RSA_BITS <= key.key_size <= _MAX_RSA_BITS and key.public_numbers().e.bit_length() <= _MAX_EXPONENT_BITS
    ):
        return None
    return PublicKey(kid=kid, algorithm=algorithm, key=key)
