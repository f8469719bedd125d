"""`oriel keys new`: makes an API key. The key is shown once; documents hold only its SHA-256."""

import argparse
import hashlib
import secrets

__all__ = ["add_arguments", "new_key", "run"]

KEY_BYTES = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("new", help="print a fresh key once, and the line for tenants.toml that accepts it")


def run(args: argparse.Namespace) -> int:
    key, digest = new_key()
    print(f"key (shown once, give it to the tenant):\n  {key}\n")
    print(f'for the tenant in tenants.toml:\n  keys = [{{ sha256 = "{digest}" }}]')
    return 0


def new_key() -> tuple[str, str]:
    """A fresh key of 256 random bits and the lower-case hex SHA-256 of its UTF-8 bytes."""
    key = f"oriel_{secrets.token_urlsafe(KEY_BYTES)}"
    return key, hashlib.sha256(key.encode()).hexdigest()
