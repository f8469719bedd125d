"""Loads that a gateway asks the servers of a pool for, by the work that they report."""

from collections import Counter
from dataclasses import replace

import pytest

from oriel_gateway.pools.model_placement import PoolPlacement
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.pools.server_reports import Report, ReportedModel

from .endpoint_pools import pool

SERVERS = [f"s{number}" for number in range(4)]
SLICE = 0.01


class Servers:
    """Four servers that each do one second of work in a second, in turns of a second.

    has: (server, model) of what is in memory. A load takes one turn.
    """

    def __init__(self, *has: tuple[str, str]) -> None:
        self.has = set(has)
        self._busy_s: Counter[tuple[str, str]] = Counter()
        self._calls: Counter[tuple[str, str]] = Counter()
        self._now = 100.0
        self.placement = PoolPlacement(PoolGate(replace(pool(4), place_models=True)))

    def turn(self, demand: dict[str, float]) -> float:
        """Serve a second of the demand, wherever the least work is; return the work that was done."""
        work = dict.fromkeys(SERVERS, 0.0)
        for model, seconds in demand.items():
            for _ in range(round(seconds / SLICE)):
                server = min((name for name in SERVERS if (name, model) in self.has), key=work.__getitem__)
                if work[server] < 1.0:
                    work[server] += SLICE
                    self._busy_s[server, model] += SLICE
                    self._calls[server, model] += 1
        self._now += 1.0
        loads = self.placement.decide({name: self._report(name) for name in SERVERS}, 4, self._now)
        self.has |= set(loads.items())
        return sum(work.values())

    def _report(self, server: str) -> Report:
        models = [
            ReportedModel(
                name=model,
                state="loaded" if (server, model) in self.has else "available",
                bytes={},
                load_s=1.0,
                busy_s=self._busy_s[server, model],
                calls=self._calls[server, model],
                waiting=0,
                wanted=False,
            )
            for model in ("a", "b")
        ]
        return Report(up_s=1.0, loading=(0, 0), budgets={}, fixed={}, models=models)


@pytest.mark.parametrize("together", [False, True])
def test_a_load_that_turns_from_1_to_10_to_10_to_1_is_served_in_five_seconds(together: bool) -> None:
    """The best split serves all of it: 2.2 of 4 servers."""
    servers = Servers(("s0", "a"), ("s0" if together else "s1", "b"))
    done = [servers.turn({"a": 0.2, "b": 2.0}) for _ in range(6)]
    assert done[-1] >= 0.9 * 2.2
    done = [servers.turn({"a": 2.0, "b": 0.2}) for _ in range(6)]
    assert done[-1] >= 0.9 * 2.2, "after five turns"


def test_a_model_without_calls_is_loaded_nowhere_else() -> None:
    servers = Servers(("s0", "a"), ("s1", "b"))
    for _ in range(10):
        servers.turn({"a": 0.3})
    assert servers.has == {("s0", "a"), ("s1", "b")}
