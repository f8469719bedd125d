"""Adds up the requests that have ended, once, for everything that counts them.

A `Cell` has the requests of one tenant for one target that ended in the same second with the same outcome. Metrics,
use and budgets, kept promises, and the console read cells and nothing else, so that none of them can count what another
one does not.

Records are added up some hundred at a time (`Stats.count`). Each step is done once per cell instead of once per request
where requests have something in common.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from oriel_gateway.errors import Outcome
from oriel_gateway.observe.record import Judged, Record
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Tenant
from oriel_wire.context import ANNOUNCED, Used, parse_cost, parse_tokens

# compiled, a member of an enum costs a look-up by name each time
_ANSWERED: Final = Outcome.ANSWERED
_LEFT: Final = Outcome.CALLER_LEFT
_LATE: Final = Outcome.DEADLINE_EXCEEDED


class Promises:
    """Counts of requests by what became of the promise of their tier. causes: the number of late and missed ones by
    cause.
    """

    __slots__ = ("causes", "excused", "late", "met", "missed")

    def __init__(self) -> None:
        self.met = self.late = self.missed = self.excused = 0
        self.causes: dict[str, int] = {}

    def broke(self, judged: Judged) -> None:
        """Count a request that did not keep its promise."""
        result = judged.result
        if result == "late":
            self.late += 1
        elif result == "missed":
            self.missed += 1
        else:
            self.excused += 1
            return
        self.causes[judged.cause] = self.causes.get(judged.cause, 0) + 1

    def add(self, other: "Promises") -> None:
        """Add the counts of `other`."""
        self.met += other.met
        self.late += other.late
        self.missed += other.missed
        self.excused += other.excused
        for cause, count in other.causes.items():
            self.causes[cause] = self.causes.get(cause, 0) + count


class Count:
    """The use of some calls, in the counters of the usage ledger but the rows, of which a gateway knows nothing."""

    __slots__ = ("bytes_in", "bytes_out", "cpu_ns", "device_ns", "requests", "tokens_in", "tokens_out")

    def __init__(self) -> None:
        self.requests = self.device_ns = self.cpu_ns = self.bytes_in = self.bytes_out = 0
        self.tokens_in = self.tokens_out = 0

    def add(self, record: Record) -> None:
        """Count a call."""
        self.requests += 1
        self.bytes_in += record.bytes_in
        self.bytes_out += record.bytes_out

    def values(self, device_ns: int, cpu_ns: int) -> tuple[int, ...]:
        """Return the numbers in the order of the counters of the ledger, with these times."""
        sizes = (self.bytes_in, self.bytes_out, self.tokens_in, self.tokens_out)
        return (self.requests, 0, device_ns, cpu_ns, *sizes)


class Charge:
    """The use of the calls of a cell, as far as their tenant is charged for it.

    cut_off: the calls were cut off by their clients. Otherwise they were answered.
    reported: the calls whose answers reported their use.
    estimated: the others, whose device time is estimated, with the tokens that the gateway itself read; and every call
    that was cut off.
    device_class: the class of `reported.device_ns`.
    classes: the class of the devices behind each pool, as answers have named it, for calls whose answer does not come
    to name it.
    """

    __slots__ = ("_classes", "_others", "_pool", "cut_off", "device_class", "estimated", "reported")

    def __init__(self, pool: str, classes: dict[str, str], cut_off: bool) -> None:
        self._pool = pool
        self._classes = classes
        self.cut_off = cut_off
        self.reported = Count()
        self.estimated = Count()
        self.device_class = ""
        self._others: dict[str, int] = {}  # the device time of other classes

    def count_answered(self, records: Sequence[Record], executes: bool) -> None:
        """Charge answered calls. executes: True if their target executes a model or service. A call's share of the time
        in which its pool was busy is the estimate of a device time that its answer does not report.
        """
        estimated, reported, estimated_ns = self.estimated, self.reported, 0
        for record in records:
            used, tokens = record.used, None
            cost = parse_cost(used) if used else None
            if cost is None and record.sent_s and executes:
                if used:
                    tokens = parse_tokens(used)
                if not used.startswith(ANNOUNCED):
                    estimated.requests += 1
                    estimated.bytes_in += record.bytes_in
                    estimated.bytes_out += record.bytes_out
                    estimated_ns += round((record.ended_s - record.sent_s) / (record.beside or 1) * 1e9)
                    if tokens is not None:
                        estimated.tokens_in += tokens[0]
                        estimated.tokens_out += tokens[1]
                    continue
                # Its server has recorded it, but its trailers were lost: an estimate counts here, and not in the bill.
                cost = self._estimate(record, _busy_ns(record))
            reported.add(record)
            if cost is not None:  # else nothing was executed: a list, metadata, another call's answer
                self._use(cost, reported)
        estimated.device_ns += estimated_ns

    def _estimate(self, record: Record, busy_ns: int) -> Used:
        """Return the cost of a call that reported none."""
        tokens_in, tokens_out = parse_tokens(record.used) or (0, 0)
        return Used(busy_ns, 0, self._classes.get(self._pool, ""), tokens_in, tokens_out)

    def count_cut_off(self, record: Record, executes: bool) -> None:
        """Charge a call that its client cut off: by leaving, or by a deadline of its own.

        Otherwise a client could have all of an answer but its end, or keep a device at work, and spend nothing. A call
        that is late by no fault of its client counts only if a part of its answer has passed.
        """
        judged = record.judged
        if record.response_s:
            if record.status >= 400:
                return
        elif record.outcome is not _LEFT and (judged is None or judged.result != "excused"):
            return
        self.estimated.add(record)
        cost = parse_cost(record.used) if record.used else None
        if cost is None:
            # A stream of gRPC also lasts while its client asks for nothing. A list or metadata uses no device.
            idles = (record.protocol == "grpc" and record.answered_s < record.ended_s) or not executes
            cost = self._estimate(record, 0 if idles else _busy_ns(record))
        self._use(cost, self.estimated)

    def _use(self, cost: Used, tokens: Count) -> None:
        """Add the cost of a call, and its tokens to `tokens`."""
        reported = self.reported
        if cost.device_class != self.device_class:
            self._others = self.device_classes()
            self.device_class = self._classes[self._pool] = cost.device_class
            reported.device_ns = self._others.pop(cost.device_class, 0)
        reported.device_ns += cost.device_ns
        reported.cpu_ns += cost.cpu_ns
        tokens.tokens_in += cost.tokens_in
        tokens.tokens_out += cost.tokens_out

    def device_classes(self) -> dict[str, int]:
        """Return the device time by class, without estimates."""
        own_ns = self.reported.device_ns
        return {**self._others, self.device_class: own_ns} if own_ns else self._others

    @property
    def requests(self) -> int:
        """The calls that are charged."""
        return self.reported.requests + self.estimated.requests

    def tokens(self) -> tuple[int, int]:
        """Return the tokens that were read, and those that were written."""
        reported, estimated = self.reported, self.estimated
        return reported.tokens_in + estimated.tokens_in, reported.tokens_out + estimated.tokens_out


class Cell:
    """The requests of one tenant for one target that ended in one second with one outcome.

    second: a second of the monotonic clock. status: the first digit of their status.
    tenant, target: the tenant and the target of the requests; None if they were refused before it was known.
    opened: the requests became calls of the target's pool.
    answered: they got a good answer, in time or late.
    waits_s: seconds in the queue, of those that had to wait. upstream_s: seconds until the upstream's head, of those
    that got one. permit_s: seconds for which they held a permit, all together.
    bad: the records of those that did not keep a promise, and of all whose sender is not known.
    charge: the usage to bill; None if nobody is charged for them.
    """

    __slots__ = (
        *("answered", "bad", "bytes_in", "bytes_out", "charge", "durations_s", "opened", "outcome", "permit_s"),
        *("promises", "requests", "second", "status", "target", "tenant", "upstream_s", "waits_s"),
    )

    def __init__(self, record: Record, second: int, classes: dict[str, str]) -> None:
        tenant, target, outcome = record.tenant, record.target, record.outcome
        self.second = second
        self.tenant: Tenant | None = tenant
        self.target: Target | None = target
        self.outcome = outcome
        self.status = record.status // 100
        self.opened = record.opened
        self.answered = record.opened and outcome is _ANSWERED and record.status < 400
        self.requests = self.bytes_in = self.bytes_out = 0
        self.permit_s = 0.0
        self.durations_s: list[float] = []
        self.upstream_s: list[float] = []
        self.waits_s: list[float] = []
        self.promises = Promises()
        self.bad: list[Record] = []
        self.charge: Charge | None = None
        # A model call of a service is charged with the service's own call.
        if tenant is not None and target is not None and not tenant.caller and record.opened:
            if self.answered or outcome is _LEFT or outcome is _LATE:
                self.charge = Charge(target.pool, classes, not self.answered)

    def add(self, records: Sequence[Record]) -> None:
        """Count these requests."""
        self.requests += len(records)
        if self.tenant is None:
            self.bad += records
        for record in records:
            if (judged := record.judged) is not None:
                self.promises.broke(judged)
                if self.tenant is not None:
                    self.bad.append(record)
            elif self.tenant is not None:
                self.promises.met += 1
        if not self.opened:
            return
        bytes_in = bytes_out = 0
        permit_s, durations_s, upstream_s = 0.0, self.durations_s, self.upstream_s
        for record in records:
            ended_s, sent_s, response_s = record.ended_s, record.sent_s, record.response_s
            bytes_in += record.bytes_in
            bytes_out += record.bytes_out
            durations_s.append(ended_s - record.received_s)
            if record.permit_s:
                permit_s += ended_s - record.permit_s
            if sent_s and response_s:
                upstream_s.append(response_s - sent_s)
            if record.ahead >= 0:
                self.waits_s.append((record.permit_s or ended_s) - record.queued_s)
        self.bytes_in += bytes_in
        self.bytes_out += bytes_out
        self.permit_s += permit_s
        if (charge := self.charge) is None or self.target is None:
            return
        if self.answered:
            charge.count_answered(records, self.target.executes)
            return
        for record in records:
            if record.sent_s:
                charge.count_cut_off(record, self.target.executes)


def add_up(batch: Iterable[Record], classes: dict[str, str]) -> list[Cell]:
    """Return the cells of some records. classes: the classes of devices, see `Charge`; updated in place."""
    records_of: dict[tuple[int, int, int, int, int], list[Record]] = {}
    found: list[Record] = []
    tenant: Tenant | None = None
    target: Target | None = None
    outcome, status, opened, begins_s, ends_s = _ANSWERED, -1, False, 0.0, 0.0
    for record in batch:
        if (
            record.tenant is not tenant
            or record.target is not target
            or record.outcome is not outcome
            or record.status != status
            or record.opened is not opened
            or not begins_s <= record.ended_s < ends_s
        ):
            tenant, target, outcome = record.tenant, record.target, record.outcome
            status, opened, second = record.status, record.opened, int(record.ended_s)
            begins_s, ends_s = float(second), second + 1.0
            # Tenants and targets are known by their identity: to hash a target would cost more than all the rest.
            key = (second, id(tenant), id(target), id(outcome), 2 * (status // 100) + opened)
            found = records_of.setdefault(key, [])
        found.append(record)
    cells = []
    for (second, *_), records in records_of.items():
        cell = Cell(records[0], second, classes)
        cell.add(records)
        cells.append(cell)
    return cells


def _busy_ns(record: Record) -> int:
    return round((record.ended_s - record.sent_s) / max(1, record.beside) * 1e9)
