"""A circuit breaker that needs more evidence to close the more often its dependency has failed again.

While it is closed, requests go through. After `threshold` failures in a row it opens: only one probe per `probe_s` goes
through. A successful probe closes it, on probation: for `probation_s` a single failure opens it again. Each time that
happens, four times as many probes in a row have to succeed, at most `MAX_PROBES`.
"""

MAX_PROBES = 8


class Breaker:
    """Times are monotonic seconds. Single writer."""

    def __init__(self, *, threshold: int = 5, probe_s: float = 1.0, probation_s: float = 10.0) -> None:
        self._threshold = threshold
        self._probe_s = probe_s
        self._probation_s = probation_s
        self.closed = True
        self._failures = 0
        self._good = 0  # probes that succeeded in a row
        self._needed = 1
        self._next_probe_s = 0.0
        self._trusted_s = 0.0  # end of the probation

    def probe(self, now: float) -> bool:
        """Return whether a probe of the open breaker is due: True once per `probe_s` seconds."""
        if self.closed or now < self._next_probe_s:
            return False
        self._next_probe_s = now + self._probe_s
        return True

    def on_probation(self, now: float) -> bool:
        """Return whether a single failure opens the breaker."""
        return now < self._trusted_s

    def succeeded(self, now: float) -> None:
        """Record an answer that came in time."""
        self._failures = 0
        if self.closed:
            if now >= self._trusted_s:
                self._needed = 1
            return
        self._good += 1
        if self._good >= self._needed:
            self.closed = True
            self._trusted_s = now + self._probation_s

    def record_failure(self, now: float) -> None:
        """Record an answer that did not come, or came too late."""
        self._good = 0
        self._failures += 1
        if not self.closed:
            return
        on_probation = self.on_probation(now)
        if on_probation or self._failures >= self._threshold:
            if on_probation:
                self._needed = min(MAX_PROBES, self._needed * 4)
            self.closed = False
            self._next_probe_s = now + self._probe_s
