"""The open loop: every request leaves at its scheduled moment, whether earlier ones were answered or not.

One pacer wakes the pump at the next arrival; the pump sends what is due (at most BURST at a time, so that answers are
read in between) and arms the pacer again. Latency counts from the scheduled moment. Two things keep it bounded: at most
`max_in_flight` requests are under way, and an arrival more than TOO_LATE_S behind its schedule is not sent any more.
Both are counted as the generator's own fault and keep the phase from being quoted. A phase begins at its time whatever
happened to the one before; a request belongs to the phase in which it was scheduled.
"""

import asyncio
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, takewhile
from random import Random
from time import monotonic, process_time

from oriel_tools.load.arrivals import bursty, merged, poisson, ramp, replayed, uniform
from oriel_tools.load.pacer import Pacer
from oriel_tools.load.scenario import Scenario, Stream, trace_of
from oriel_tools.load.senders import Sender, Ticket
from oriel_tools.load.tally import Outcome, Tally, Timeline

BURST = 32
TOO_LATE_S = 1.0
SWEEP_S = 0.05
LEAD_S = 0.05
LAST_WAIT_S = 1.0

Arrivals = Iterator[tuple[float, int]]


@dataclass(slots=True)
class Record:
    """The result of a run. tallies: [phase][stream]; timelines: a timeline for each tier; ran_s: seconds until sending
    ended.
    """

    tallies: list[list[Tally]]
    timelines: dict[str, Timeline]
    ran_s: float = 0.0
    interrupted: bool = False
    phase: int = 0  # phase of the latest arrival
    busy: dict[int, float] = field(default_factory=dict)  # phase: share of a core this process used


def offered(scenario: Scenario) -> list[Callable[[], Arrivals]]:
    """Return each phase's arrivals: offset from the phase's start and index of the stream. Traces are read here."""
    phases: list[Callable[[], Arrivals]] = []
    for number, phase in enumerate(scenario.phase):
        traced = phase.arrivals == "trace"
        traces = [trace_of(phase, stream) if traced else [] for stream in scenario.stream]
        phases.append(partial(_phase, scenario, number, traces))
    return phases


def _phase(scenario: Scenario, number: int, traces: Sequence[Sequence[float]]) -> Arrivals:
    streams = zip(scenario.stream, traces, strict=True)
    return merged([_schedule(scenario, number, stream, trace) for stream, trace in streams])


def _schedule(scenario: Scenario, number: int, stream: Stream, trace: Sequence[float]) -> Iterator[float]:
    phase = scenario.phase[number]
    if phase.rate is not None:
        rate = phase.rate * stream.weight / sum(each.weight for each in scenario.stream)
    else:
        rate = phase.rates.get(stream.name, 0.0)
    random = Random(f"{scenario.seed}/{number}/{stream.name}")
    if phase.arrivals == "trace":
        return replayed(trace, phase.seconds)
    if phase.arrivals == "uniform":
        return uniform(rate, phase.seconds)
    if phase.arrivals == "bursty":
        return bursty(rate, phase.seconds, random, factor=phase.burst_factor, burst_s=phase.burst_s)
    if phase.arrivals == "ramp":
        return ramp(rate, phase.seconds, random, factor=phase.ramp_factor)
    return poisson(rate, phase.seconds, random)


def schedule(scenario: Scenario) -> Iterator[tuple[float, int, int]]:
    """Return the arrivals of all phases: offset from the start of the run, number of the phase, index of the stream.

    Traces are read now, not when the arrivals are.
    """
    starts = accumulate((phase.seconds for phase in scenario.phase), initial=0.0)
    phases = zip(starts, offered(scenario), strict=False)
    return (
        (start + offset, number, stream)
        for number, (start, arrivals) in enumerate(phases)
        for offset, stream in arrivals()
    )


@dataclass(slots=True, kw_only=True)
class _Lane:
    """One stream while it runs. under_way: its tickets in order of sending, so those to give up are in front."""

    stream: Stream
    sender: Sender
    timeline: Timeline
    target_s: float | None
    tallies: list[Tally]
    under_way: dict[Ticket, None] = field(default_factory=dict)


class Generator:
    """Runs one scenario once, over one sender per stream. `record` may be read at any time."""

    def __init__(self, scenario: Scenario, senders: Sequence[Sender]) -> None:
        self._scenario = scenario
        self._starts = list(accumulate((phase.seconds for phase in scenario.phase), initial=0.0))
        self._arrivals = schedule(scenario)
        tail_s = max(stream.gives_up_s for stream in scenario.stream)
        timelines = {stream.tier: Timeline(scenario.seconds, tail_s) for stream in scenario.stream}
        tallies = [[Tally() for _ in scenario.stream] for _ in scenario.phase]
        self.record = Record(tallies=tallies, timelines=timelines)
        self._lanes = [
            _Lane(
                stream=stream,
                sender=sender,
                timeline=timelines[stream.tier],
                target_s=stream.target_ms / 1e3 if stream.target_ms is not None else None,
                tallies=[phase[index] for phase in tallies],
            )
            for index, (stream, sender) in enumerate(zip(scenario.stream, senders, strict=True))
        ]
        self._ended = [partial(self._end, lane) for lane in self._lanes]
        self._under_way = 0
        self._began = 0.0
        self._due = 0.0
        self._arrival: tuple[int, int] | None = None  # phase, lane; None: everything was sent

    @property
    def under_way(self) -> int:
        """Requests that were sent and have not ended."""
        return self._under_way

    async def run(self) -> None:
        """Send everything, then wait for what is under way (each request until its stream gives up on it).

        When it is cancelled, requests under way are abandoned and not counted.
        """
        self._loop = asyncio.get_running_loop()
        self._all_sent: asyncio.Future[None] = self._loop.create_future()
        self._all_ended: asyncio.Future[None] = self._loop.create_future()
        self._pacer = Pacer(self._pump)
        self._began = monotonic() + LEAD_S
        self._advance()
        gc.collect()
        gc.freeze()  # present objects are not walked again and again while answers are timed
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        try:
            self._turned = (monotonic(), process_time())
            self._pacer.at(self._due)
            await self._all_sent
            self._turn(self.record.phase, monotonic())
            self.record.ran_s = min(max(0.0, monotonic() - self._began), self._starts[-1])
            if self._under_way:
                if self.record.interrupted:
                    self._loop.call_later(LAST_WAIT_S, self._leave)
                await self._all_ended
        finally:
            self._sweeper.cancel()
            self._pacer.close()
            gc.unfreeze()

    def interrupt(self) -> None:
        """Send nothing more; `run` returns after at most a second."""
        self.record.interrupted = True
        if not self._all_sent.done():
            self._all_sent.set_result(None)
        else:
            self._leave()

    def _advance(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is None:
            self._arrival = None
            self._due = self._began + self._starts[-1]
        else:
            self._due = self._began + arrival[0]
            self._arrival = arrival[1:]

    def _pump(self) -> None:
        if self._all_sent.done():
            return
        for _ in range(BURST):
            now = monotonic()
            if self._due > now:
                self._pacer.at(self._due)
                return
            if self._arrival is None:
                self._all_sent.set_result(None)
                return
            self._send(*self._arrival, now)
            self._advance()
        self._loop.call_soon(self._pump)

    def _send(self, phase: int, index: int, now: float) -> None:
        lane = self._lanes[index]
        tally = lane.tallies[phase]
        due = self._due
        tally.scheduled += 1
        if phase != self.record.phase:
            self._turn(phase, now)
        moment = lane.timeline.at(due - self._began)
        moment.arrivals += 1
        if self._under_way >= self._scenario.max_in_flight or now - due > TOO_LATE_S:
            moment.unsent += 1
            tally.left_out("too late" if now - due > TOO_LATE_S else "too many under way")
            return
        ticket = Ticket(phase, due, now, self._ended[index])
        tally.sent += 1
        tally.lag.add(now - due)
        self._under_way += 1
        lane.under_way[ticket] = None
        lane.sender.send(ticket)

    def _turn(self, phase: int, now: float) -> None:
        """The phase being sent is over, `phase` begins."""
        cpu_s = process_time()
        since_s, before_s = self._turned
        self.record.busy[self.record.phase] = (cpu_s - before_s) / max(now - since_s, 1e-9)
        self._turned = (now, cpu_s)
        self.record.phase = phase

    def _end(self, lane: _Lane, ticket: Ticket, outcome: Outcome) -> None:
        if ticket not in lane.under_way:
            return
        del lane.under_way[ticket]
        now = monotonic()
        latency_s = now - ticket.due_s
        kept = lane.tallies[ticket.phase].finished(outcome, latency_s, now - ticket.sent_s, lane.target_s)
        arrived, answered = lane.timeline.at(ticket.due_s - self._began), lane.timeline.at(now - self._began)
        if outcome.kind == "good":
            answered.good += 1
            arrived.latency.add(latency_s)
            arrived.kept += kept
        else:
            answered.others += 1
        self._under_way -= 1
        if not self._under_way and self._all_sent.done() and not self._all_ended.done():
            self._all_ended.set_result(None)

    def _sweep(self) -> None:
        """Give up requests that take too long; in every lane the oldest is in front."""
        now = monotonic()
        for lane in self._lanes:
            self._give_up(lane, now - lane.stream.gives_up_s, "timed out")
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    def _leave(self) -> None:
        for lane in self._lanes:
            self._give_up(lane, monotonic(), "interrupted")

    def _give_up(self, lane: _Lane, sent_before_s: float, reason: str) -> None:
        # A copy: ending takes tickets out.
        for ticket in list(takewhile(lambda each: each.sent_s <= sent_before_s, lane.under_way)):
            lane.sender.cancel(ticket)
            self._end(lane, ticket, Outcome("failed", reason))
