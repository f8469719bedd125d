"""Decides whether a phase may be quoted: only if the generator itself kept to the schedule. Pure."""

from dataclasses import dataclass

from oriel_tools.load.histogram import Histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class LagRule:
    """max_lag_ms: milliseconds by which a request may be late; max_busy: share of a core the generator may use.

    Lag is read on the generator's own loop; work behind it (grpc's own thread) shows only in the processor's time.
    """

    max_lag_ms: float = 10.0
    max_busy: float = 0.95

    def objection(self, lag: Histogram, unsent: int, busy: float) -> str | None:
        """Return why a phase is not quoted; None if it is.

        It is quoted if every arrival was sent, 99 % within max_lag_ms, and the generator was not short of processor.
        Arrivals also sample how long an answer waits to be read by the same loop, so a phase that passes has read its
        answers on time as well.
        """
        if unsent:
            return f"{unsent} arrivals were not sent at all"
        late_s = lag.percentile_s(0.99)
        if late_s * 1e3 > self.max_lag_ms:
            return (
                f"1 % of the requests were sent {late_s * 1e3:.1f} ms late or later (allowed: {self.max_lag_ms:g} ms)"
            )
        if busy > self.max_busy:
            return f"the generator was busy for {busy * 100:.0f} % of a core (allowed: {self.max_busy * 100:.0f} %)"
        return None

    def allows_p999(self, lag: Histogram) -> bool:
        """Tell whether the 99.9th percentile of latency is the server's and not the generator's."""
        return lag.percentile_s(0.999) * 1e3 <= self.max_lag_ms
