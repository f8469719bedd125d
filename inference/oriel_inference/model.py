"""A model as the rest of the server knows it: names, shapes, bounds. Values only."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from oriel_policies.waiting.batch import BatchBounds
from oriel_wire.v2.messages import Array

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\Z")
_VERSION = re.compile(r"(?:0|[1-9][0-9]{0,17})\Z")
SAMPLE_EVERY = 100
# Option of ONNX Runtime's CUDA provider.
GRAPH_OPTION = "enable_cuda_graph"


def is_model_name(name: str) -> bool:
    """Return whether the name consists of 1 to 128 letters, digits, `.`, `_` and `-` without a leading dot."""
    return _NAME.match(name) is not None


def is_served_name(name: str) -> bool:
    """Return whether the catalog may have a model of that name, see `base_name`."""
    base, at, number = name.partition("@")
    return is_model_name(base) and (not at or is_version(number))


def base_name(name: str) -> str:
    """Return the name of a model in its repository. A name that several repositories hold ends in @ and the
    repository's number in the catalog.
    """
    return name.partition("@")[0]


def is_version(text: str) -> bool:
    """Return whether the text is a decimal number without sign and leading zeros."""
    return _VERSION.match(text) is not None


class ModelState(Enum):
    """The states of the repository index."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """An input or output as the model file has it.

    shape: includes the batch dimension; -1 is variable.
    optional: an input for which the file has a value of its own.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """An input or output as clients see it.

    dims: without the batch dimension; -1 is variable.
    engine_dims: the shape that the runtime sees where it differs (the configuration's `reshape`).
    labels: class names by index.
    ragged: requests with different shapes of it may share a batch.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    engine_dims: tuple[int, ...] | None = None
    optional: bool = False
    labels: tuple[str, ...] = ()
    ragged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """The rules by which the requests of one priority level wait.

    max_items: the most requests that may wait; 0 for the server's own bound.
    timeout_s: seconds that a request may wait; None until its deadline.
    delays: True if a request that has waited for longer stays, behind those of its level that have not, instead of
    being refused.
    allow_override: True if a request's own `timeout` may shorten timeout_s.
    """

    max_items: int = 0
    timeout_s: float | None = None
    delays: bool = False
    allow_override: bool = False

    def limits(self, now: float, deadline: float, timeout_s: float | None) -> tuple[float, float | None]:
        """Return a request's deadline and when this policy gives up on it, both absolute. timeout_s: its own `timeout`.

        A policy with a timeout takes precedence over `timeout`, as in Triton; otherwise `timeout` shortens the
        deadline.
        """
        patience_s = self.timeout_s
        if patience_s is None:
            return (deadline if timeout_s is None else min(deadline, now + timeout_s)), None
        if self.allow_override and timeout_s is not None:
            patience_s = min(patience_s, timeout_s)
        return deadline, now + patience_s


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRules:
    """The queue policies and priorities of a model.

    policy: the policy of levels that are not in by_level.
    by_level: levels with a policy of their own.
    priority_levels: 0 without priorities; then the only level is 0.
    default_priority: the level of requests that name none.
    preserve_ordering: answers are delivered in the order in which their requests came, within a tier and tenant.
    """

    policy: QueuePolicy = field(default_factory=QueuePolicy)
    by_level: Mapping[int, QueuePolicy] = field(default_factory=dict)
    priority_levels: int = 0
    default_priority: int = 0
    preserve_ordering: bool = False

    def of(self, level: int) -> QueuePolicy:
        """Return the policy of `level`."""
        return self.by_level.get(level, self.policy)

    @property
    def max_items(self) -> int:
        """Return how many requests all levels together may hold; 0 if one of them is not bounded."""
        sizes = [self.of(level).max_items for level in self.levels]
        return sum(sizes) if all(sizes) else 0

    @property
    def bounded(self) -> bool:
        """Return whether a level has a bound of its own."""
        return any(self.of(level).max_items for level in self.levels)

    @property
    def levels(self) -> range:
        """Return every level that a request can have."""
        return range(1, self.priority_levels + 1) if self.priority_levels else range(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU. capability: CUDA's compute capability, such as "9.0". bus_id: its PCI address; "" if unknown."""

    number: int
    capability: str
    bus_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options with which a backend opens a model file.

    providers: (execution provider, its options) in order of preference; what none of them runs, and everything if there
    is none, runs on the CPU.
    graph_level: -1 basic, 0 all, 1 extended, 2 no optimisations.
    session_entries, run_entries: the runtime's own settings of a session and of each run.
    compiler_settings: the settings of the compiler of the model's artefact, as `Compiler.settings` read them; for a
    model of OpenVINO's own, the same settings and those of `repository.openvino`.
    concurrent_runs: number of runs of one session at once.
    inputs, outputs: the tensors of the configuration, for files that do not describe theirs.
    operators: paths of libraries of custom operators.
    python: path of the interpreter of a Python model; "" for the server's.
    """

    providers: Sequence[tuple[str, Mapping[str, str]]] = ()
    intra_op_threads: int = 1
    inter_op_threads: int = 1
    parallel_execution: bool = False
    graph_level: int = 0
    memory_arena: bool = True
    memory_pattern: bool = True
    session_entries: Mapping[str, str] = field(default_factory=dict)
    run_entries: Mapping[str, str] = field(default_factory=dict)
    compiler_settings: Mapping[str, str] = field(default_factory=dict)
    concurrent_runs: int = 1
    inputs: Sequence[TensorInfo] = ()
    outputs: Sequence[TensorInfo] = ()
    operators: Sequence[str] = ()
    python: str = ""

    def for_child(self) -> dict[str, Any]:
        """Return the options for a child process that tries the model: with one thread, because serving goes first."""
        return asdict(replace(self, intra_op_threads=1, inter_op_threads=1, concurrent_runs=1))

    @property
    def cuda_graphs(self) -> bool:
        """Return whether ONNX Runtime captures CUDA graphs."""
        return any(given.get(GRAPH_OPTION) == "1" for _, given in self.providers)


# Name and device of a resource of the rate limiter: a GPU's number, 0 also for the host, or EVERYWHERE.
Resource = tuple[str, int]
EVERYWHERE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLimit:
    """The resources that an instance holds while it runs. priority: 1 is the highest."""

    needs: Mapping[Resource, int]
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleStep:
    """One model of an ensemble.

    version: 0 for the latest.
    inputs, outputs: the model's tensor -> the ensemble's tensor.
    """

    model: str
    version: int
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


class ControlKind(Enum):
    """The facts about a step that a sequence model may ask for. The names are those of the configuration."""

    START = "CONTROL_SEQUENCE_START"
    READY = "CONTROL_SEQUENCE_READY"
    END = "CONTROL_SEQUENCE_END"
    CORRID = "CONTROL_SEQUENCE_CORRID"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceControl:
    """An input that the server fills in for each step of a sequence.

    false, true: one row of the values of a control that is a flag; `false` alone is used for CORRID, whose rows without
    a sequence have it.
    """

    tensor: TensorSpec
    kind: ControlKind
    false: Array
    true: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceState:
    """A tensor that the server keeps between the steps of a sequence.

    tensor: the input that it goes into. output: the output that it comes from.
    initial: the value for the first step, one row.
    """

    tensor: TensorSpec
    output: TensorSpec
    initial: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceRules:
    """The `sequence_batching` of a model.

    idle_s: seconds for which a sequence keeps its slot without a step.
    slots: number of sequences that one instance holds.
    padded: True if rows stand at the numbers of their slots, with rows that are not ready between them.
    iterative: True if a request is executed again and again until the model releases it.
    """

    idle_s: float
    slots: int
    padded: bool = False
    iterative: bool = False
    controls: tuple[SequenceControl, ...] = ()
    states: tuple[SequenceState, ...] = ()


class BatchInput(NamedTuple):
    """An input by which the server describes a batch of requests of unequal shapes.

    kind: the description, as the configuration names it. targets: the input's names.
    source: the input that is described.
    """

    kind: str
    targets: tuple[str, ...]
    source: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedRules:
    """The batches of a model with ragged inputs. outputs: those whose elements go to requests by the shape of an input,
    with the name of that input.
    """

    inputs: tuple[BatchInput, ...]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One version of one model.

    max_batch_size: 0 means that tensors have no batch dimension.
    bounds: None means that every request runs alone.
    instances: executions that may run at once.
    by_demand: True if the configuration sets no count: up to `instances`, as many as the cores hold, run on demand.
    decoupled: a request has any number of responses.
    cached: its answers are kept in the response cache, if the server has one.
    steps: the steps of an ensemble, which runs nothing itself.
    max_inflight: the most runs of one step at once; 0 means unbounded.
    sample_every: the number of rows of which about one is sampled for its distribution; 0 means none.
    sequences: the rules of a model whose requests are steps of sequences. Its controls and states are not among
    `inputs` and `outputs`, unless clients get a state too.
    ragged: the rules of a model whose ragged inputs come end to end. Python models get their requests one by one.
    limits: one for each session, where the rate limiter is on and they need something.
    """

    name: str
    version: int
    platform: str
    backend: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    bounds: BatchBounds | None
    queue: QueueRules = field(default_factory=QueueRules)
    instances: int = 1
    by_demand: bool = False
    decoupled: bool = False
    cached: bool = False
    steps: tuple[EnsembleStep, ...] = ()
    max_inflight: int = 0
    sample_every: int = SAMPLE_EVERY
    sequences: SequenceRules | None = None
    ragged: RaggedRules | None = None
    limits: tuple[InstanceLimit, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def batched(self) -> bool:
        """Return whether tensors carry a batch dimension."""
        return self.max_batch_size > 0

    def wire_shape(self, tensor: TensorSpec) -> tuple[int, ...]:
        """Return the shape that clients send or get, with -1 for the batch and for variable dimensions."""
        return (-1, *tensor.dims) if self.batched else tensor.dims
