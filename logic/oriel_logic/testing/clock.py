"""A clock that stands still until a test moves it."""

__all__ = ["FakeClock"]


class FakeClock:
    """Seconds, as `time.monotonic`. `ctx.remaining_s` follows it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
