"""Reaches the admin port of a gateway, with the admin token of the environment."""

import os
from pathlib import Path
from typing import Any, Final

from oriel_cli import probe
from oriel_cli.errors import CommandFailed
from oriel_wire.process.flags import split_url

ANSWER_S = 10.0
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


def address(url: str) -> tuple[str, int]:
    """Return host and port of `--admin`. Raises CommandFailed."""
    parts = split_url(url)
    if parts.scheme != "http" or not parts.hostname or parts.port is None:
        raise CommandFailed(f"{url!r} is not http://HOST:PORT")
    return parts.hostname, parts.port


async def document(host: str, port: int, path: str) -> dict[str, Any]:
    """Return the JSON object that the admin port answers. Raises CommandFailed."""
    answer = await probe.get(host, port, path, timeout_s=ANSWER_S, headers=token_headers())
    if answer is None:
        raise CommandFailed(f"no gateway answers on the admin port {host}:{port}: pass --admin http://HOST:PORT")
    if answer.status == 401:
        raise CommandFailed(f"the gateway wants its admin token: set {TOKEN}")
    if isinstance(answer.document, dict) and (answer.status == 200 or "decisions" in answer.document):
        return answer.document
    raise CommandFailed(f"{host}:{port} is not the admin port of a gateway (it answered with status {answer.status})")
