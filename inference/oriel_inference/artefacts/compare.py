"""Compares a model with its variants, and with what compilers make of it: how far the outputs differ, and how long a
run takes. For `oriel models compare`, without a server. All functions block.

Whatever is compared is built and checked in child processes, as a server does. Only what could be run there is opened
in this process, where the runs of all take turns.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from oriel_inference.artefacts.process import (
    ArtefactRefused,
    BuildBounds,
    ChildProcesses,
    Wanted,
    compile_into,
    measure_outputs,
)
from oriel_inference.backends import OutsideProfile, Session, find_backend
from oriel_inference.errors import InferenceError, LoadFailed
from oriel_inference.repository.check import CheckPool
from oriel_inference.repository.compiling import (
    COMPILE_KEY,
    ITSELF,
    TOLERANCE_KEY,
    VARIANT_KEY,
    Compilation,
    Samples,
    compilers,
    samples_of,
    variants,
)
from oriel_inference.repository.config import parameter
from oriel_inference.repository.engines import default_file
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.stores.local import LocalStore
from oriel_policies.artefacts.comparison import OutputError, disagreement, parse_tolerance
from oriel_policies.artefacts.differences import measure_all
from oriel_wire.v2.messages import Array
from oriel_wire.v2.proto import model_config_pb2 as pb

CHECK_S = 60.0
BATCHES = (1, 8, 32)
SERVED = "served"  # the name of the answers of a running server
WARM_RUNS = 2
MIN_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonOptions:
    """The choices of somebody who asks for a comparison.

    also: names of compilers to compare beside those that the model's configuration asks for.
    batches: rows of the batches to time; empty for those of `BATCHES` that the model takes.
    runs: timed runs of each contestant for one batch size, at least `MIN_RUNS`.
    seconds: time after which no further runs of one batch size begin.
    cores: number of cores that a run may use.
    bounds: limits of the processes that build and check.
    """

    also: Sequence[str] = ()
    batches: Sequence[int] = ()
    runs: int = 50
    seconds: float = 10.0
    cores: int = 1
    bounds: BuildBounds = BuildBounds()


@dataclass(slots=True)
class Contestant:
    """One of those compared: the model itself, a variant, what a compiler made of it, or the answers of a server.

    state: "reference", "agrees", "differs" (it would not serve), or "failed".
    reason: why it would not serve, or why a batch size was not timed; of the reference too.
    errors: differences of each output, over `samples` samples.
    session: None unless it can be run; closed once the comparison has ended.
    provider: the execution provider that ran it; "" if nothing did.
    median_ms, cpu_ms: rows of a batch -> median time of a run, and CPU time of a run, in milliseconds. 0 rows: a model
    without a batch dimension.
    """

    name: str
    state: str = "failed"
    reason: str = ""
    errors: Sequence[OutputError] = ()
    samples: int = 0
    session: Session | None = None
    provider: str = ""
    median_ms: dict[int, float] = field(default_factory=dict)
    cpu_ms: dict[int, float] = field(default_factory=dict)

    def measured(self, session: Session, errors: Sequence[OutputError], samples: int) -> None:
        """Take the outcome of a comparison of outputs, and the session to time."""
        self.session, self.provider, self.errors, self.samples = session, session.provider, errors, samples
        self.reason = disagreement(errors)
        self.state = "differs" if self.reason else "agrees"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One version of a model; the first contestant is the reference."""

    model: str
    version: int
    contestants: Sequence[Contestant]


def compare(
    root: Path,
    model: str,
    options: ComparisonOptions,
    *,
    served: Callable[[LoadedVersion], Session] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Compare the newest version that can be loaded with its variants, and with what compilers make of it. All run
    where the model's instances do, without its accelerators. One that cannot be loaded or run is listed with its error.

    served: returns a session whose answers come from elsewhere, to compare as well.
    Raises LoadFailed if the model cannot be loaded or has nothing to be compared with.
    """
    with ExitStack() as stack:
        check = CheckPool(CHECK_S)
        stack.callback(check.close_idle)
        store, cores = LocalStore(root, runs_code=False), options.cores

        def load(override: pb.ModelConfig | None) -> tuple[int, LoadedVersion]:
            loading = Loading(
                store, model, find_backend=find_backend, cores=cores, models=1, check=check, override=override
            )
            return _newest(load_model(loading), model)

        config = Loading(store, model, find_backend=find_backend, cores=cores, models=1).configuration()
        version, loaded = load(_plain(config))
        stack.callback(loaded.close)
        samples = samples_of(store, model, loaded.config, loaded.spec)
        found: list[Contestant] = []
        for name in _names(store, model, version, config, options.also):
            progress(f"{name}: building and comparing")
            found.append(one := Contestant(name))
            try:
                _, other = load(_asking(config, name))
            except LoadFailed as failure:
                one.reason = failure.reason
                continue
            other.close()
            assert other.compilation is not None  # its configuration asks for one
            folder = TemporaryDirectory(prefix="oriel-compare-", ignore_cleanup_errors=True)
            _compile(one, other.compilation, Path(stack.enter_context(folder)), options.bounds)
        if served is not None:
            progress(f"{SERVED}: comparing")
            found.append(_served(served(loaded), loaded, config, samples))
        if not found:
            stem = Path(_filename(config)).stem
            wanted = ", ".join(f"{stem}.{each}.onnx" for each in variants()[1:])
            raise LoadFailed(f"{model}/{version} has no variants beside its model file: {wanted}")
        for each in found:
            if each.session is not None:
                stack.callback(each.session.close)
        own = loaded.sessions[0]
        found.insert(0, Contestant(ITSELF, state="reference", session=own, provider=own.provider))
        _time(found, loaded, samples, options, progress)
        return Comparison(model=model, version=version, contestants=found)


def _time(
    contestants: Sequence[Contestant],
    loaded: LoadedVersion,
    samples: Samples,
    options: ComparisonOptions,
    progress: Callable[[str], None],
) -> None:
    """Time the runs of all contestants that have a session; the first one is the reference."""
    itself, by_name = contestants[0], {each.name: each for each in contestants}
    sessions = {each.name: each.session for each in contestants if each.session is not None}
    for rows, inputs in _batches(loaded, samples, options.batches):
        if not inputs:
            itself.reason = f"{loaded.spec.name} takes batches of 1 to {loaded.spec.max_batch_size} rows, not {rows}"
            continue
        progress(f"timing batches of {rows}" if rows else "timing runs")

        def note_failure(name: str, error: InferenceError, rows: int = rows) -> None:
            one = by_name[name]
            if one is not itself and not isinstance(error, OutsideProfile):  # the model itself runs those
                one.state = "failed"
            one.reason = one.reason or f"{f'{rows} rows' if rows else 'the inputs'} cannot be run: {error.message}"

        times = take_turns(sessions, inputs, runs=options.runs, seconds=options.seconds, failed=note_failure)
        for name, (run_ms, cpu_ms) in times.items():
            by_name[name].median_ms[rows], by_name[name].cpu_ms[rows] = run_ms, cpu_ms


def take_turns(
    sessions: Mapping[str, Session],
    inputs: Mapping[str, Array],
    *,
    runs: int,
    seconds: float,
    failed: Callable[[str, InferenceError], None],
) -> dict[str, tuple[float, float]]:
    """Run the sessions in turns, each second round in reverse; return name -> median time and mean CPU time of a run,
    in milliseconds.

    failed: called with the name and the error of a session that cannot run the inputs, which is then left out.
    The CPU time is that of the whole process, which must do nothing else.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sessions}
    began = time.monotonic()
    order = list(sessions)
    for number in range(WARM_RUNS + runs):
        if number >= WARM_RUNS + MIN_RUNS and time.monotonic() - began > seconds:
            break
        for name in order[:] if number % 2 else order[::-1]:
            session = sessions[name]
            names = [output.name for output in session.outputs]
            cpu, entered = time.process_time(), time.perf_counter()
            try:
                session.run(inputs, names)
            except InferenceError as error:
                failed(name, error)
                order.remove(name)
                del taken[name]
                continue
            left = time.perf_counter()
            if number >= WARM_RUNS:
                taken[name].append((left - entered, time.process_time() - cpu))
    return {
        name: (median(run for run, _ in found) * 1e3, sum(cpu for _, cpu in found) / len(found) * 1e3)
        for name, found in taken.items()
    }


def _compile(one: Contestant, compilation: Compilation, folder: Path, bounds: BuildBounds) -> None:
    """Build an artefact into an empty folder, compare its outputs, and open it if that was possible."""
    children = ChildProcesses(bounds)
    try:
        wanted = Wanted.of(compilation, bounds)
        with compilation.source() as source:
            artefact = folder / compile_into(wanted, source, folder, children)
            one.errors, one.samples = measure_outputs(wanted, source, artefact, children)
        session = compilation.compiler.open(artefact, compilation.place.options)
        one.measured(session, one.errors, one.samples)
    except (ArtefactRefused, LoadFailed) as refused:
        one.reason = refused.reason


def _served(session: Session, loaded: LoadedVersion, config: pb.ModelConfig, samples: Samples) -> Contestant:
    """Compare the answers of a session, which is held to the tolerance of what the configuration asks for."""
    one, reference = Contestant(SERVED), loaded.sessions[0]
    names = [output.name for output in reference.outputs]
    precision = parameter(config, VARIANT_KEY).upper() or parameter(config, f"{COMPILE_KEY}.precision")
    text = parameter(config, TOLERANCE_KEY)
    try:
        own = parse_tolerance(text) if text else None
    except ValueError as error:
        raise LoadFailed(f"parameters[{TOLERANCE_KEY!r}] {error}") from error
    pairs = []
    try:
        for sample in samples:
            try:
                expected = reference.run(sample, names)
            except InferenceError:
                continue
            pairs.append((session.run(sample, names), expected))
    except InferenceError as error:
        one.reason = error.message
        return one
    outputs = [(info.name, info.datatype) for info in reference.outputs]
    one.measured(session, measure_all(outputs, pairs, precision, own), len(pairs))
    return one


def _batches(loaded: LoadedVersion, samples: Samples, wanted: Sequence[int]) -> Iterator[tuple[int, dict[str, Array]]]:
    """Yield the inputs of each batch size, made from the largest sample that the model takes; none for a size that it
    does not take. Raises LoadFailed.
    """
    spec, session = loaded.spec, loaded.sessions[0]
    names = [output.name for output in session.outputs]
    for sample in sorted(samples, key=lambda each: -sum(array.size for array in each.values())):
        try:
            session.run(sample, names)
        except InferenceError:
            continue
        break
    else:
        raise LoadFailed(f"{spec.name} runs with none of the samples: configure a model_warmup")
    if not spec.batched:
        yield 0, sample
        return
    for rows in wanted or sorted({min(each, spec.max_batch_size) for each in BATCHES}):
        fits = 1 <= rows <= spec.max_batch_size
        given = sample if fits else {}
        yield rows, {name: np.resize(array, (rows, *array.shape[1:])) for name, array in given.items()}


def _names(store: LocalStore, model: str, version: int, config: pb.ModelConfig, also: Sequence[str]) -> Iterator[str]:
    """Yield what to compare: the variants that are there, and compilers. Raises LoadFailed for an unknown one."""
    stem, there = Path(_filename(config)).stem, store.files(model, version)
    yield from (each for each in variants()[1:] if f"{stem}.{each}.onnx" in there)
    own = parameter(config, COMPILE_KEY)
    for name in dict.fromkeys((*([own] if own else ()), *also)):
        if name not in compilers():
            raise LoadFailed(f"{name[:64]!r} is not one of {', '.join(compilers())}")
        yield name


def _plain(config: pb.ModelConfig) -> pb.ModelConfig:
    """Return the configuration of the reference: without accelerators, a compiler or a variant."""
    plain = pb.ModelConfig()
    plain.CopyFrom(config)
    for key in [each for each in plain.parameters if each == VARIANT_KEY or each.startswith(COMPILE_KEY)]:
        del plain.parameters[key]
    plain.optimization.execution_accelerators.Clear()
    return plain


def _asking(config: pb.ModelConfig, name: str) -> pb.ModelConfig:
    """Return the configuration that asks for `name`, with the owner's tolerance, and the settings if the owner asks
    for it, too.
    """
    asking = _plain(config)
    key = VARIANT_KEY if name in variants() else COMPILE_KEY
    own = parameter(config, key) == name
    for each in config.parameters:
        if each == TOLERANCE_KEY or (own and each.startswith(f"{COMPILE_KEY}.")):
            asking.parameters[each].CopyFrom(config.parameters[each])
    asking.parameters[key].string_value = name
    return asking


def _newest(found: Mapping[int, LoadedVersion | LoadFailed | None], model: str) -> tuple[int, LoadedVersion]:
    """Return the newest version that was loaded, and close the others. Raises LoadFailed."""
    loaded = {version: each for version, each in found.items() if isinstance(each, LoadedVersion)}
    for version, each in loaded.items():
        if version != max(loaded):
            each.close()
    if loaded:
        return max(loaded), loaded[max(loaded)]
    raise next((each for each in found.values() if isinstance(each, LoadFailed)), LoadFailed(f"{model} has no version"))


def _filename(config: pb.ModelConfig) -> str:
    return config.default_model_filename or default_file("onnxruntime")
