"""Certificates for tests, made with openssl; tests that need them skip where it is missing."""

import shutil
import subprocess
from pathlib import Path

import pytest

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="makes certificates with openssl")


def certificate(folder: Path, name: str, hosts: str = "DNS:localhost,IP:127.0.0.1") -> tuple[Path, Path]:
    """Create a self-signed certificate and its key, for `hosts` (by default localhost), with the common name `name`."""
    assert OPENSSL is not None
    chain, key = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(
        [
            *(OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(key), "-out", str(chain), "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", f"subjectAltName={hosts}"),
        ],
        check=True,
        capture_output=True,
    )
    return chain, key
