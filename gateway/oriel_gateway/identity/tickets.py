"""Tickets: a logic server calls models for the tenant of a request by the ticket that came with the request.

A gateway that has keys adds a ticket to each call of a service. The logic server sends it with the model calls of that
request to the internal port of any gateway with the same keys. It names tenant, tier, request and its end, and is
signed (HMAC-SHA256), so a logic server can pass it on and make none of its own.
"""

from collections.abc import Sequence
from hmac import compare_digest, digest
from pathlib import Path
from time import time
from typing import Final

from oriel_gateway.errors import Refused
from oriel_gateway.identity.keys import unauthenticated
from oriel_policies.documents import ApiKey, Snapshot, Tenant
from oriel_policies.documents.promises import by_ticket
from oriel_wire.context import TICKET, TICKET_SCHEME
from oriel_wire.errors import StartFailed
from oriel_wire.process.environment import take_secret
from oriel_wire.process.shared_settings import TICKET_KEYS

_MIN_KEY: Final = 32
_MAX_KEYS: Final = 8
_MAX_FILE: Final = 65536
_MAX_TICKET: Final = 512
_LEEWAY_S: Final = 5.0  # tolerated difference between the clocks of two gateways


def ticket_keys(file: Path | None) -> tuple[bytes, ...]:
    """Return the keys of a file or of the environment, split by commas or lines; none without either.

    Raises StartFailed.
    """
    text = take_secret(TICKET_KEYS)
    if file is not None:
        try:
            with file.open(encoding="ascii") as opened:
                text = opened.read(_MAX_FILE)
        except (OSError, UnicodeDecodeError) as error:
            raise StartFailed("the file of --ticket-keys cannot be read as text") from error
    keys = tuple(key.encode("ascii", "replace") for key in text.replace(",", " ").split())
    if file is not None and not keys or len(keys) > _MAX_KEYS or any(len(key) < _MIN_KEY for key in keys):
        raise StartFailed(
            f"give 1 to {_MAX_KEYS} ticket keys of at least {_MIN_KEY} characters, split by commas or lines: make "
            f"one with `openssl rand -hex 32` for --ticket-keys or {TICKET_KEYS}"
        )
    return keys


class Tickets:
    """Signs and reads tickets. keys: the first one signs, all are accepted."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys

    def line(self, tenant: Tenant, request_id: str, left_s: float) -> str:
        """Return the header line of a call's ticket, which is valid for as long as the call may take.

        left_s: seconds until the call's deadline, before which its answer begins; a stream may go on after that.
        """
        ends = int(time() + left_s + tenant.tier.stream_max_s) + 1
        text = f"{tenant.name}/{tenant.tier.name}/{request_id}/{ends}"
        return f"{TICKET}: {text}/{_signed(self._keys[0], text)}\r\n"

    def identify(self, credentials: Sequence[tuple[str, str]], snapshot: Snapshot) -> ApiKey:
        """Return the key that a ticket stands for. Raises Refused UNAUTHENTICATED.

        credentials: see `keys.identify`.
        """
        name, value = credentials[0] if len(credentials) == 1 else ("", "")
        scheme, _, ticket = value.partition(" ")
        if name != "authorization" or scheme != TICKET_SCHEME:
            raise unauthenticated(
                "this port takes only model calls of logic servers: send the ticket of the request that they serve"
            )
        text, _, signature = ticket.rpartition("/")
        if len(ticket) > _MAX_TICKET or not ticket.isascii():
            raise _invalid()
        if not any(compare_digest(signature, _signed(key, text)) for key in self._keys):
            raise _invalid()
        tenant_name, tier_name, request_id, ends = text.split("/")
        if int(ends) + _LEEWAY_S <= time():
            raise unauthenticated("the ticket has expired: the request that it came with is over")
        tenant, tier = snapshot.tenants.get(tenant_name), snapshot.tiers.get(tier_name)
        if tenant is None or tier is None:
            raise unauthenticated("the tenant or tier of the ticket no longer exists")
        served = by_ticket(tenant, tier, snapshot.served)
        return ApiKey(tenant=served, expires_at=int(ends) + _LEEWAY_S, name=request_id, delegated=True)


def _signed(key: bytes, text: str) -> str:
    return digest(key, text.encode(), "sha256").hex()


def _invalid() -> Refused:
    return unauthenticated("the ticket is not valid: it was altered, or signed with a key that this gateway has not")
