"""Reads the admin token with which commands reach the admin port of a gateway."""

import os
from pathlib import Path
from typing import Final

from oriel_cli.errors import CommandFailed

TOKEN: Final = "ORIEL_ADMIN_TOKEN or ORIEL_ADMIN_TOKEN_FILE"


def token_headers() -> tuple[tuple[str, str], ...]:
    """Return the header with the admin token of the environment; none without a token. Raises CommandFailed."""
    token, path = os.environ.get("ORIEL_ADMIN_TOKEN", ""), os.environ.get("ORIEL_ADMIN_TOKEN_FILE", "")
    if path and not token:
        try:
            token = Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CommandFailed("the file that ORIEL_ADMIN_TOKEN_FILE names cannot be read") from error
    return (("authorization", f"Bearer {token}"),) if token else ()
