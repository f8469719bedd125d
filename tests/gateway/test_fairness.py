"""Fairness between the tenants of a tier, whatever costs their servers report."""

from collections import Counter, deque
from typing import Any

import pytest

from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.routing.targets import resolve
from oriel_policies.documents import compile_documents
from oriel_policies.promise.routing import RouteTable
from oriel_policies.waiting.flows import Ticket

from .stack import digest, documents

SECOND = f'[tenants.second]\ntier = "gold"\nmodels = ["*"]\nkeys = [{{ sha256 = "{digest("second")}" }}]'


class Waiting:
    """A call that waits or runs."""

    def __init__(self, who: str, running: "deque[Waiting]") -> None:
        self.who = who
        self.ticket: Ticket | None = None
        self._running = running

    def admitted(self) -> None:
        self._running.append(self)

    def displaced(self) -> None:
        raise AssertionError("the queue is large enough")


@pytest.mark.parametrize(("cost_us", "least"), [(0, 40), (10**15, 20), (5000, 400)])
def test_a_tenants_turns_are_neither_free_nor_priceless(cost_us: int, least: int) -> None:
    """The cost of a turn has a lower and an upper bound.

    Otherwise a tenant whose calls report no cost gets 4,991 of 5,000 turns, and one whose server reports absurd costs
    gets none.
    """
    snapshot = compile_documents(documents([1], extra=SECOND, pool='probe = ""\nlearn_concurrency = false'))
    gate, table = PoolGate(snapshot.pools["p"]), RouteTable(snapshot.routes)
    tenants: dict[str, Any] = {name: snapshot.tenants[name] for name in ("g", "second")}
    targets = {name: resolve("POST", "/v2/models/m/infer", "", tenant, table) for name, tenant in tenants.items()}
    running: deque[Waiting] = deque()
    turns: Counter[str] = Counter()

    def come(who: str) -> None:
        call = Waiting(who, running)
        if gate.admission.acquire():
            running.append(call)
        else:
            more: dict[str, float] = {"received_s": 1e9, "deadline": 2e9}
            call.ticket = gate.join_queue(call, tenants[who], targets[who], size_bytes=0, **more)

    for _ in range(40):
        come("g")
        come("second")
    for _ in range(1000):
        call = running.popleft()
        turns[call.who] += 1
        reported = cost_us if call.who == "g" else 5000
        share_s = 0.04 / gate.streams.at_servers
        charge_s = gate.charge(targets[call.who], tenants[call.who], 0.04, share_s, reported * 1e-6)
        if call.ticket is not None:
            gate.settle(call.ticket, charge_s)
        gate.release_permit(targets[call.who].counted, 0.04, True)
        come(call.who)
    assert min(turns.values()) >= least, turns
