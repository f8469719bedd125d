"""The state of one call of an ensemble on its way through the graph."""

from collections.abc import Sequence

from oriel_inference.batching.call import Answer, Call, StepRun
from oriel_inference.catalog import ServingModel
from oriel_inference.clock import Timer
from oriel_inference.ensembles.graph import Graph
from oriel_policies.waiting.flows import Ticket
from oriel_wire.v2.messages import Array


class CallState:
    """A call in progress.

    tensors: None for an optional input that the request left out, or for an output that its model left out.
    missing: per step, how many tensors it still waits for.
    uses: tensor -> how many steps still need it.
    todo: number of steps that have not ended.
    needed: the steps that run.
    outputs: the requested outputs of the ensemble.
    waiting: step -> its ticket at the concurrency limit.
    stages: seconds of compute input, infer and output, over all steps.
    """

    __slots__ = (
        "call",
        "cost_us",
        "device_ns",
        "ended",
        "missing",
        "models",
        "needed",
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

    def __init__(self, call: Call, models: Sequence[ServingModel], graph: Graph, outputs: frozenset[str]) -> None:
        self.call = call
        self.outputs = outputs
        choice = graph.choice(outputs)
        self.needed = choice.steps
        self.models = models
        self.size_bytes = call.ticket.size_bytes
        self.tensors: dict[str, Array | None] = {}
        self.missing = list(graph.needs)
        self.uses = dict(choice.uses)
        self.todo = len(self.needed)
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
