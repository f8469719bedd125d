"""Certificates of any validity, with their keys."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = datetime.now(UTC)


def pair(folder: Path, *, begins: timedelta, ends: timedelta) -> tuple[Path, Path]:
    key, other = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "api")])
    made = x509.CertificateBuilder().subject_name(other).issuer_name(other).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(NOW + begins).not_valid_after(NOW + ends)
    chain, secret = folder / "tls.crt", folder / "tls.key"
    chain.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, none))
    return chain, secret
