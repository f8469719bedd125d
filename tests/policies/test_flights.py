"""Single-flight as a state machine: each member ends once, each key has one piece of work at a time."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from oriel_policies.upstreams.flights import Flight, Flights


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.flights: Flights[int] = Flights()
        self.working: dict[int, Flight[int]] = {}  # key -> whose work runs
        self.waiting: dict[int, Flight[int]] = {}  # member -> its flight
        self.ended: set[int] = set()
        self.next = 0

    @rule(key=st.integers(0, 3))
    def join(self, key: int) -> None:
        self.next += 1
        flight, founded = self.flights.join(key, self.next)
        assert founded == (key not in self.working)
        assert self.flights.find(key) is flight
        self.working[key] = flight
        self.waiting[self.next] = flight

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if not self.waiting:
            return
        member = data.draw(st.sampled_from(sorted(self.waiting)))
        flight = self.waiting.pop(member)
        stop = self.flights.leave(flight, member)
        assert stop == (flight not in self.waiting.values())
        assert not self.flights.leave(flight, member)
        if stop:
            del self.working[int(str(flight.key))]
            assert self.flights.land(flight) == []

    @rule(key=st.integers(0, 3))
    def land(self, key: int) -> None:
        flight = self.working.pop(key, None)
        if flight is None:
            return
        members = self.flights.land(flight)
        assert members == sorted(member for member, of in self.waiting.items() if of is flight)
        assert not self.ended & set(members)
        self.ended |= set(members)
        for member in members:
            del self.waiting[member]
        assert self.flights.land(flight) == []

    @invariant()
    def work_runs_exactly_where_somebody_waits(self) -> None:
        assert set(map(id, self.working.values())) == set(map(id, self.waiting.values()))
        assert len(self.flights) == len(self.working)


Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestFlights = Machine.TestCase
