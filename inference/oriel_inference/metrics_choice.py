"""The latencies that `/metrics` shows, by `--metrics-config`."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from oriel_wire.errors import StartFailed
from oriel_wire.process.flags import switch

QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class MetricsChoice:
    """The latency metrics to show.

    counters: True for counters. histograms: True for histograms. quantiles: the quantiles of summaries; () for none.
    """

    counters: bool = True
    histograms: bool = True
    quantiles: Sequence[float] = ()

    def hides(self, name: str) -> bool:
        """Return whether a family is not shown."""
        counter = name.startswith("nv_") and name.endswith(("_duration_us", "_duration_per_model"))
        return counter and not self.counters or name.endswith("_histogram_ms") and not self.histograms


def from_metrics_config(settings: Iterable[str]) -> MetricsChoice:
    """Return the choice that the values of the flag make. The error that Triton's form has behind each quantile is not
    needed: it is 1 % of the value for all. Raises StartFailed.
    """
    chosen = {"counter_latencies": True, "histogram_latencies": True, "summary_latencies": False}
    quantiles: Sequence[float] = QUANTILES
    for text in settings:
        key, _, value = text.partition("=")
        try:
            if key == "summary_quantiles":
                quantiles = tuple(sorted({float(each.partition(":")[0]) for each in value.split(",")}))
            elif key in chosen:
                chosen[key] = switch(value)
            if key not in (*chosen, "summary_quantiles") or not 0.0 <= quantiles[0] <= quantiles[-1] <= 1.0:
                raise ValueError
        except (ValueError, argparse.ArgumentTypeError) as error:
            form = f"{', '.join(chosen)} with true or false, or summary_quantiles=0.5:0.05,0.99:0.001"
            raise StartFailed(f"--metrics-config {text[:80]!r}: write {form}") from error
    shown = quantiles if chosen["summary_latencies"] else ()
    return MetricsChoice(chosen["counter_latencies"], chosen["histogram_latencies"], shown)
