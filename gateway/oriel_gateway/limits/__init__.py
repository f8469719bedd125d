"""Limit what tenants may send: the `Limiter` and its grants, for one process or for several gateways."""

from oriel_gateway.limits.embedded import EmbeddedLimiter
from oriel_gateway.limits.grants import Grant, Waiter
from oriel_gateway.limits.metered import Limiter
from oriel_gateway.limits.shared import SharedLimiter
from oriel_gateway.limits.streams import StreamGrant

__all__ = ["EmbeddedLimiter", "Grant", "Limiter", "SharedLimiter", "StreamGrant", "Waiter"]
