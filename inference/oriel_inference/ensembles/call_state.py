"""The state of one call of an ensemble on its way through the graph."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from oriel_inference.batching.call import Answer, Call, StepRun
from oriel_inference.catalog import ServingModel
from oriel_inference.clock import Timer
from oriel_inference.ensembles.graph import Graph
from oriel_policies.waiting.flows import Ticket
from oriel_policies.waiting.queue import SlaQueue
from oriel_wire.v2.messages import Array


class Flow:
    """The responses of a decoupled step. They go through the steps behind it one after the other.

    waiting: those whose turn has not come, each with its function to call once it is consumed.
    consumed: the function of the response that is on its way; None if none is.
    over: no response follows.
    """

    __slots__ = ("consumed", "over", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[tuple[Sequence[Array], Callable[[], None]]] = deque()
        self.consumed: Callable[[], None] | None = None
        self.over = False


class CallState:
    """A call in progress.

    tensors: None for an optional input that the request left out, or for an output that its model left out.
    missing: per step, how many tensors it still waits for.
    uses: tensor -> how many steps still need it.
    origins: per step, its origin, and last: that of the outputs; see `graph.origins_of`.
    todo: number of steps that have not ended, by their origins.
    flows: per decoupled step, its responses.
    needed: the steps that run.
    outputs: the requested outputs of the ensemble.
    waiting: step -> its ticket at the concurrency limit.
    stages: seconds of compute input, infer and output, over all steps.
    """

    __slots__ = (
        "all_uses",
        "call",
        "cost_us",
        "device_ns",
        "ended",
        "flows",
        "last",
        "missing",
        "models",
        "needed",
        "origins",
        "outputs",
        "running",
        "size_bytes",
        "stages",
        "steps",
        "tensors",
        "timer",
        "todo",
        "uses",
        "waiting",
    )

    def __init__(
        self,
        call: Call,
        models: Sequence[ServingModel],
        graph: Graph,
        outputs: frozenset[str],
        origins: Mapping[int, int],
        last: int,
    ) -> None:
        self.call = call
        self.outputs = outputs
        choice = graph.choice(outputs)
        self.needed = choice.steps
        self.models = models
        self.origins, self.last = origins, last
        self.size_bytes = call.ticket.size_bytes
        self.tensors: dict[str, Array | None] = {}
        self.missing = list(graph.needs)
        self.uses = dict(choice.uses)
        self.all_uses = choice.uses
        self.todo = Counter(origins[step] for step in self.needed)
        self.flows = {step: Flow() for step in self.needed if models[step].spec.decoupled}
        self.running: dict[int, Call] = {}
        self.waiting: dict[int, Ticket] = {}
        self.timer: Timer | None = None
        self.steps: list[StepRun] = []
        self.stages = [0.0, 0.0, 0.0]
        self.cost_us = self.device_ns = 0
        self.ended = False

    def charge(self, answer: Answer) -> None:
        """Add the time and the cost of a step."""
        times, stages = answer.times, self.stages
        stages[0] += times.assembled_s - times.started_s
        stages[1] += times.computed_s - times.assembled_s
        stages[2] += times.split_s - times.computed_s
        self.cost_us += answer.cost_us
        self.device_ns += answer.device_ns


class StepLimit:
    """Limits how often one step runs at once (`max_inflight_requests`) and orders the calls that wait.

    It has `limit` places, each taken by `acquire` or passed on by `release`. The number of waiting calls is not bounded
    here.

    Every place has to be freed with `release` exactly once.
    """

    __slots__ = ("_free", "_waiting")

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting = SlaQueue(max_items=0, max_bytes=0)

    def __len__(self) -> int:
        """Return how many calls wait."""
        return len(self._waiting)

    def acquire(self) -> bool:
        """Take a place if one is free."""
        if not self._free:
            return False
        self._free -= 1
        return True

    def wait(self, waiter: CallState, like: Ticket) -> Ticket:
        """Wait for a place, in the order of the queue. like: the ticket of the waiting call."""
        ticket = Ticket(
            band=like.band,
            tenant=like.tenant,
            deadline=like.deadline,
            cost=like.cost,
            weight=like.weight,
            payload=waiter,
        )
        ticket.order, ticket.admitted = like.order, True
        self._waiting.push(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Stop waiting."""
        self._waiting.remove(ticket)
        ticket.payload = None

    def release(self) -> CallState | None:
        """Free a place: return the waiting call that has it now, or None if it is free for the next one."""
        ticket = self._waiting.pop()
        if ticket is None:
            self._free += 1
            return None
        waiter: CallState = ticket.payload
        ticket.payload = None
        return waiter
