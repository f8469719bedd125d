"""Counts and logs every request that ends: latency and refusals per tier, the access log, memory of large requests.

One of `finished` and `refused_early` is called per request, by its request record; `turned_away` is for requests that
were refused before they had one. Labels come only from the catalog and from trusted peers, and are bounded. Single
writer: the loop.
"""

import logging
from collections import Counter
from collections.abc import Callable
from time import monotonic

from oriel_inference.batching.statistics import LATENCY_S, OTHER_TIERS
from oriel_inference.catalog import Catalog, ServingModel
from oriel_inference.dataplane.dataplane import Completion
from oriel_inference.errors import InferenceError, Outcome
from oriel_inference.servers.access_log import AccessLog
from oriel_inference.servers.spans import Ended
from oriel_wire.context import CallContext
from oriel_wire.engine.large_messages import LARGE_BYTES, LargeMessages
from oriel_wire.observe.exemplars import Exemplars
from oriel_wire.observe.orca import encode_report
from oriel_wire.v2.datatypes import quoted

_log = logging.getLogger(__name__)

MAX_REFUSED = 4096
_GIVE_BACK_S = 2.0  # trimming locks the allocator for some milliseconds


class Meter:
    """Counts requests.

    log: the access log; None if there is none.
    refused: (model, tier, outcome) -> requests that never reached a version.
    kept: traces that were kept, by why: `ratio` (it began here), `client` (its caller had it kept) or `error`.
    traces: takes each request that has ended, for the files of Triton's traces; None while nothing is traced there.
    exemplars: traces of answered requests by (model, version, tier), in the buckets of their latency.
    """

    def __init__(self, catalog: Catalog, log: AccessLog | None = None) -> None:
        self._catalog = catalog
        self.log = log
        self.refused: Counter[tuple[str, str, Outcome]] = Counter()
        self.max_refused = MAX_REFUSED
        self.kept: Counter[str] = Counter()
        self.traces: Callable[[Ended], None] | None = None
        self.exemplars: Exemplars[tuple[str, str, str]] = Exemplars()
        self._large = LargeMessages(delay_s=_GIVE_BACK_S)

    def finished(
        self,
        ctx: CallContext,
        completion: Completion,
        received_s: float,
        protocol: str,
        size: int,
        size_out: int = 0,
    ) -> None:
        """Count a request that a version answered or failed, or whose caller left. size: bytes of the request as it
        arrived. size_out: bytes of the answer.
        """
        statistics = completion.serving.batcher.statistics
        tier = statistics.tiers.get(ctx.tier) or statistics.tier(ctx.tier)
        error = completion.error
        ended_s = monotonic()
        if size >= LARGE_BYTES:
            self._large.freed(size)
        if error is None:
            tier.latency.observe(ended_s - received_s)
            answer = completion.answer
            if answer is not None and (usage := answer.usage) is not None:
                usage.touch()
                usage.requests += 1
                usage.rows += completion.rows
                usage.bytes_in += size
                usage.bytes_out += size_out
        else:
            tier.refusals[error.outcome] += 1
        if self.log is not None:
            self.log.finished(ctx, completion, received_s, ended_s, protocol, size)
        if _log.isEnabledFor(logging.DEBUG):
            serving = completion.serving
            _log.debug(
                "request %s: %s by model %s version %s after %.3f ms, %.1f ms left",
                ctx.request_id,
                "answered" if error is None else f"not answered ({error.outcome.value}: {error.message!r})",
                serving.spec.name,
                serving.version,
                (ended_s - received_s) * 1e3,
                ctx.remaining_s(ended_s) * 1e3,
            )

    def refused_early(
        self, ctx: CallContext, error: InferenceError, model: str, received_s: float, protocol: str, size: int
    ) -> None:
        """Count a request that was refused before it reached a version. model: the requested name, perhaps unknown."""
        self._count(model, ctx.tier, error.outcome)
        if size >= LARGE_BYTES:
            self._large.freed(size)
        if self.log is not None:
            self.log.refused(ctx, error.outcome, model, received_s, protocol, size)
        if _log.isEnabledFor(logging.DEBUG):
            reason = error.outcome.value
            _log.debug(
                "request %s: refused for model %s (%s: %r)", ctx.request_id, quoted(model), reason, error.message
            )

    def turned_away(self, request_id: str, status: int, outcome: Outcome, model: str = "") -> None:
        """Count an HTTP request that was refused for its head or its framing."""
        self._count(model, "", outcome)
        if self.log is not None:
            self.log.turned_away(request_id, status, outcome, model)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("request %s: refused by its head with status %d (%s)", request_id, status, outcome.value)

    def traced(self, model: str, version: str, tier: str, seconds: float, trace_id: int) -> None:
        """Keep the trace of an answered request, whose spans were sent, as an example of its latency."""
        self.exemplars.note((model, version, tier), seconds, f"{trace_id:032x}", LATENCY_S)

    def load_header(self, serving: ServingModel, band: int, form: str) -> str:
        """Return `endpoint-load-metrics`: the load of `serving` for a request of `band`. form: "TEXT" or "JSON"."""
        batcher = serving.batcher
        named = {"queue_depth": float(batcher.pending), "warm_models": float(sum(1 for _ in self._catalog.serving()))}
        expected_s = batcher.expected_wait_s(band)
        if expected_s is not None:
            named["expected_wait_seconds"] = round(expected_s, 6)
        return encode_report(named, form)

    def close(self) -> None:
        """Write the remaining lines of the access log; blocks shortly."""
        if self.log is not None:
            self.log.close()

    def _count(self, model: str, tier: str, outcome: Outcome) -> None:
        if not self._catalog.knows(model):
            model = ""
        key = (model, tier, outcome)
        if key not in self.refused and len(self.refused) >= self.max_refused:
            key = ("", OTHER_TIERS if tier else "", outcome)
        self.refused[key] += 1
