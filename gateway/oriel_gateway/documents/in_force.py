"""The documents in force and the mistakes of those on disk, for the admin port and for metrics."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from time import time
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from oriel_gateway.documents.mirror import StoreState
from oriel_policies.documents import Snapshot
from oriel_policies.errors import BadDocument
from oriel_wire.engine.families import counter, gauge


class DocumentsInForce(Collector):
    """The state of the documents. Single writer: the gateway's loop.

    adopted_at: the time when the documents in force were adopted, in epoch seconds.
    mistakes: the mistakes of the documents on disk; empty if these are in force.
    withdrawn_keys: the keys in force that are refused because the documents on disk do not name them.
    store: the object store that the documents are mirrored from; None without one.
    """

    def __init__(self) -> None:
        self.adopted_at = time()
        self.adopted = 1
        self.refused = 0
        self.mistakes: tuple[BadDocument, ...] = ()
        self.withdrawn_keys = 0
        self.store: StoreState | None = None

    def accepted(self) -> None:
        """Note that new documents are in force."""
        self.adopted_at = time()
        self.adopted += 1
        self.mistakes = ()
        self.withdrawn_keys = 0

    def note_refused(self, bad: BadDocument) -> None:
        """Note that the documents on disk have mistakes and that those in force stay."""
        self.refused += 1
        self.mistakes = (bad, *bad.others)

    def report(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return the state for the admin port, without keys and hashes."""
        return {
            "adopted_at": round(self.adopted_at, 3),
            "adopted": self.adopted,
            "refused": self.refused,
            "tenants": len(snapshot.tenants),
            "keys": len(snapshot.keys),
            "withdrawn_keys": self.withdrawn_keys,
            "tiers": sorted(snapshot.tiers),
            "issuers": sorted(snapshot.issuers),
            "pools": sorted(snapshot.pools),
            "routes": len(snapshot.routes),
            "store": asdict(self.store) if self.store is not None else None,
            "mistakes": [{"file": bad.file, "path": bad.path, "reason": bad.reason} for bad in self.mistakes],
        }

    def collect(self) -> Iterator[Metric]:
        results = (("adopted", self.adopted), ("refused", self.refused))
        text = "Times policy documents were taken or refused."
        yield counter("oriel_gateway_policy_reloads", text, "result", results)
        text = "Mistakes in the documents on disk; above 0 older ones are in force."
        yield gauge("oriel_gateway_policy_mistakes", text, "", len(self.mistakes))
        text = "Keys of the documents in force that are refused: those on disk, which have mistakes, dropped them."
        yield gauge("oriel_gateway_policy_withdrawn_keys", text, "", self.withdrawn_keys)
        text = "When the documents in force were adopted."
        yield gauge("oriel_gateway_policy_adopted_timestamp_seconds", text, "", self.adopted_at)
        if self.store is not None:
            text = (
                "1 while the object store of the policies answers, 0 while the documents in force are kept without it."
            )
            yield gauge("oriel_gateway_policy_store_up", text, "", 0.0 if self.store.reason else 1.0)
            text = "When the object store last said that the documents mirrored here are its own."
            yield gauge("oriel_gateway_policy_store_confirmed_timestamp_seconds", text, "", self.store.confirmed_at)


def issuer_metrics(refused: Mapping[str, int], key_sets: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """Yield refused tokens by reason, and the keys of every issuer. key_sets: see `KeySets.report`."""
    yield counter("oriel_gateway_tokens_refused", "Tokens refused, by why.", "reason", refused.items())
    keys = [(each["issuer"], each["keys"]) for each in key_sets]
    yield gauge("oriel_gateway_issuer_keys", "Usable public keys of an issuer.", "issuer", keys)
    ages = [(each["issuer"], each["age_s"]) for each in key_sets if each["age_s"] is not None]
    text = "Time since an issuer's keys were read."
    yield gauge("oriel_gateway_issuer_keys_age_seconds", text, "issuer", ages)
