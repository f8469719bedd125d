"""What a tenant may send: the `Limiter` seam, its grants, the limiter of one process and that of several."""

from oriel_gateway.limits.embedded import EmbeddedLimiter
from oriel_gateway.limits.grants import Grant, Limiter, Waiter
from oriel_gateway.limits.shared import SharedLimiter
from oriel_gateway.limits.streams import StreamGrant

__all__ = ["EmbeddedLimiter", "Grant", "Limiter", "SharedLimiter", "StreamGrant", "Waiter"]
