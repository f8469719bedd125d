"""Which documents are in force, and what is wrong with those on disk: for the admin port and for metrics."""

from collections.abc import Iterable, Iterator
from time import time
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from oriel_policies.documents import Snapshot
from oriel_policies.errors import BadDocument

__all__ = ["DocumentsInForce"]


class DocumentsInForce(Collector):
    """Single writer: the gateway's loop.

    adopted_at: epoch seconds. mistakes: of the documents on disk; empty when these are the ones in force.
    """

    def __init__(self) -> None:
        self.adopted_at = time()
        self.adopted = 1
        self.refused = 0
        self.mistakes: tuple[BadDocument, ...] = ()

    def took(self) -> None:
        """New documents are in force."""
        self.adopted_at = time()
        self.adopted += 1
        self.mistakes = ()

    def kept(self, bad: BadDocument) -> None:
        """What is on disk is not good; what was in force stays."""
        self.refused += 1
        self.mistakes = (bad, *bad.others)

    def report(self, snapshot: Snapshot) -> dict[str, Any]:
        """For the admin port. No keys and no hashes."""
        return {
            "adopted_at": round(self.adopted_at, 3),
            "adopted": self.adopted,
            "refused": self.refused,
            "tenants": len(snapshot.tenants),
            "keys": len(snapshot.keys),
            "tiers": sorted(snapshot.tiers),
            "issuers": sorted(snapshot.issuers),
            "pools": sorted(snapshot.pools),
            "routes": len(snapshot.routes),
            "mistakes": [{"file": bad.file, "path": bad.path, "reason": bad.reason} for bad in self.mistakes],
        }

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        reloads = CounterMetricFamily(
            "oriel_gateway_policy_reloads", "Times policy documents were taken or refused.", labels=["result"]
        )
        reloads.add_metric(["adopted"], self.adopted)
        reloads.add_metric(["refused"], self.refused)
        yield reloads
        yield GaugeMetricFamily(
            "oriel_gateway_policy_mistakes",
            "Mistakes in the documents on disk; above 0 older ones are in force.",
            value=len(self.mistakes),
        )
        yield GaugeMetricFamily(
            "oriel_gateway_policy_adopted_timestamp_seconds",
            "When the documents in force were adopted.",
            value=self.adopted_at,
        )
