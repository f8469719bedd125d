"""Tokens and key sets like those of an identity provider."""

import json
from base64 import urlsafe_b64encode
from functools import cache
from time import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ISSUER, AUDIENCE = "https://login.example", "oriel"


@cache
def private(algorithm: str, number: int = 0) -> Any:
    """Return a private key, the same one for the same arguments, because RSA keys take long to make."""
    if algorithm == "RS256":
        return rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return ec.generate_private_key(ec.SECP256R1()) if algorithm == "ES256" else ed25519.Ed25519PrivateKey.generate()


def jwk(algorithm: str, number: int = 0, **more: str) -> dict[str, Any]:
    public = private(algorithm, number).public_key()
    kind: Any = {"RS256": RSAAlgorithm, "ES256": ECAlgorithm, "EdDSA": OKPAlgorithm}[algorithm]
    return {**json.loads(kind.to_jwk(public)), "kid": f"{algorithm}-{number}", **more}


def key_set(*keys: dict[str, Any]) -> bytes:
    return json.dumps({"keys": list(keys)}).encode()


def claims(**more: Any) -> dict[str, Any]:
    now = int(time())
    base = {"iss": ISSUER, "aud": AUDIENCE, "sub": "somebody", "iat": now, "exp": now + 300, "tenant": "g"}
    return {name: value for name, value in {**base, **more}.items() if value is not None}


def token(algorithm: str = "ES256", number: int = 0, *, header: dict[str, Any] | None = None, **more: Any) -> str:
    headers = {"kid": f"{algorithm}-{number}", **(header or {})}
    headers = {name: value for name, value in headers.items() if value is not None}
    return jwt.encode(claims(**more), private(algorithm, number), algorithm=algorithm, headers=headers)


def forged(header: dict[str, Any], secret: bytes = b"", **more: Any) -> str:
    """Return a token with any header, signed by HMAC with `secret`, or not signed."""
    import hmac

    parts = [b64(json.dumps(header).encode()), b64(json.dumps(claims(**more)).encode())]
    body = ".".join(parts)
    return f"{body}.{b64(hmac.digest(secret, body.encode(), 'sha256')) if secret else ''}"


def b64(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def pem(algorithm: str) -> bytes:
    encoded: bytes = private(algorithm).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return encoded


def issuer_table(jwks: str = "keys.json", **more: str) -> str:
    lines = "".join(f"{name} = {value}\n" for name, value in more.items())
    return f'[issuers.login]\nissuer = "{ISSUER}"\naudience = ["{AUDIENCE}", "other"]\njwks = "{jwks}"\n{lines}'
