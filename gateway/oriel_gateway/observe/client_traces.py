"""Limits how many traces a tenant's clients may have kept by setting the sampled bit of their requests."""

from typing import Final

RATE_PER_S: Final = 10.0
BURST: Final = 20.0
MAX_TENANTS: Final = 8192


class ClientTraces:
    """A leaky bucket per tenant: `RATE_PER_S` traces a second, `BURST` at once. The gateway's loop is the only writer.

    A tenant is remembered by one number, the time at which its bucket is empty, and forgotten when that is past.
    """

    __slots__ = ("_empty_s",)

    def __init__(self) -> None:
        self._empty_s: dict[str, float] = {}

    def allows(self, tenant: str, now: float) -> bool:
        """Count one trace; False: it is one too many and is not counted."""
        empty_s = max(self._empty_s.get(tenant, now), now)
        if empty_s - now > (BURST - 1.0) / RATE_PER_S:
            return False
        if len(self._empty_s) >= MAX_TENANTS and tenant not in self._empty_s:
            self._empty_s = {name: at for name, at in self._empty_s.items() if at > now}
            if len(self._empty_s) >= MAX_TENANTS:
                return False
        self._empty_s[tenant] = empty_s + 1.0 / RATE_PER_S
        return True
