"""What a tenant may send: the `Limiter` seam, its grants, and the limiter of one process."""

from oriel_gateway.limits.embedded import EmbeddedLimiter
from oriel_gateway.limits.grants import Grant, Limiter, Waiter

__all__ = ["EmbeddedLimiter", "Grant", "Limiter", "Waiter"]
