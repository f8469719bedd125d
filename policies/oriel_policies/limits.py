"""Rate limit arithmetic: GCRA, the generic cell rate algorithm (ITU-T I.371), as a virtual schedule.

The state is one number, the theoretical arrival time of the next request that would conform exactly. A request that
arrives at most `(burst - 1) / rate` before it is let through and moves it by `1 / rate`; any other is refused and moves
nothing. Equivalent to a token bucket of `burst` tokens refilled at `rate`, without refilling.
"""

from math import ceil

from oriel_policies.documents import RateLimit

__all__ = ["Gcra", "policy_header", "state_header"]


class Gcra:
    """One limited thing. Times are monotonic seconds; the single writer is the limiter that owns it."""

    __slots__ = ("arrival",)

    def __init__(self) -> None:
        self.arrival = 0.0

    def take(self, limit: RateLimit, now: float) -> float:
        """0.0 when the request conforms, and it is counted; else the seconds until one would, and nothing changes."""
        interval = 1.0 / limit.requests_per_s
        arrival = self.arrival if self.arrival > now else now
        early = arrival - now - (limit.burst - 1) * interval
        # One part in 10^9 of slack: sums of 1/rate are not exact, and a whole burst has to fit.
        if early > 1e-9 * limit.burst:
            return early
        self.arrival = arrival + interval
        return 0.0

    def remaining(self, limit: RateLimit, now: float) -> int:
        """Requests that would conform now."""
        debt = max(self.arrival - now, 0.0) * limit.requests_per_s
        return max(0, int(limit.burst - debt + 1e-6))


def policy_header(limit: RateLimit) -> str:
    """`RateLimit-Policy` (draft-ietf-httpapi-ratelimit-headers-10): the burst over the time that refills it."""
    return f'"requests";q={limit.burst};w={ceil(limit.burst / limit.requests_per_s)}'


def state_header(remaining: int, wait_s: float) -> str:
    """`RateLimit`: what is left, and the whole seconds until there is more."""
    return f'"requests";r={remaining};t={ceil(wait_s)}'
