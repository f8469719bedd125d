"""The garbage collector of a serving process: what lives as long as the process is not looked at again, and the young
are looked at less often.

A request that has ended leaves nothing that only the collector could free (a test keeps it), but every request that
waits is walked several times while it does: with 10,000 in the queue that was a third of what a request costs.
"""

import gc

__all__ = ["calm_collector"]

# Young objects before a walk, walks before the middle generation is walked (some 10 ms at most), and the old one.
THRESHOLDS = (20_000, 5, 20)


def calm_collector() -> None:
    """Call once, when everything is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
