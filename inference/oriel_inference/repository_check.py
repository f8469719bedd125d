"""Judges the model folders of repositories as a server would at its start, without a server: `oriel models check`.

Each folder is loaded by the parts that a server is made of, in its checking process first, and unloaded before the next
one. To judge the files alone, loading goes the same way up to the place where an engine would open them.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oriel_inference.assembly import open_models
from oriel_inference.backends import Backend, CodeModel, ConfiguredBackend, RequestSession, Session, find_backend
from oriel_inference.backends.python.backend import PythonBackend
from oriel_inference.catalog import Entry
from oriel_inference.errors import CompilerMissing, InferenceError, LoadFailed
from oriel_inference.host import available_cores
from oriel_inference.model import EngineOptions, Gpu
from oriel_inference.models.control import ModelControl
from oriel_inference.repository import forests, openvino
from oriel_inference.repository.ensembles import part_names
from oriel_inference.repository.load import Loading, choose_versions, load_model
from oriel_inference.repository.onnx_files import check_model_file
from oriel_inference.repository.scan import Repositories
from oriel_inference.settings import Settings
from oriel_inference.stores import ModelStore
from oriel_wire.errors import StartFailed
from oriel_wire.observe.trace import NullSink

# A configuration may ask for the GPUs of the machine that will serve it.
MANY_GPUS = tuple(Gpu(number=number, capability="") for number in range(16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement of one model folder.

    versions: those that would serve; none if the model is refused.
    runs_on: the engine's execution provider; "" if the model was not opened.
    notes: one sentence for each version that is refused and for each setting that has another effect than in Triton.
    """

    model: str
    versions: tuple[int, ...] = ()
    runs_on: str = ""
    notes: tuple[str, ...] = ()


async def check_repositories(repositories: Sequence[Path | str], scratch: Path, *, opens: bool) -> list[Verdict]:
    """Judge all folders, in the order of their names.

    scratch: an empty folder for what is fetched from object stores.
    opens: False judges the files alone, also on a machine without their engines.
    Raises StartFailed if a repository cannot be read.
    """
    settings = Settings(
        repositories=tuple(repositories),
        model_cache=scratch,
        cores=available_cores(),
        control_mode="explicit",
        cache_bytes=1,  # without a response cache the log would warn of models that want one
    )
    models = await open_models(settings, find_backend, NullSink())
    control = models.control
    control.artefacts = None  # compiling takes minutes, and models serve without it
    starting = asyncio.create_task(control.start())
    try:
        await starting
        names = sorted(control.repositories.names())
        if not opens:
            judged: dict[str, Verdict] = {}
            return [await asyncio.to_thread(_judge_files, control.repositories, name, judged) for name in names]
        return [await _judge(control, models.catalog.entries, name) for name in names]
    except LoadFailed as failure:
        raise StartFailed(failure.reason) from failure
    finally:
        await models.stop_loading()
        await models.close(starting)
        await asyncio.to_thread(models.quality.thread.close)


async def _judge(control: ModelControl, entries: Callable[[str], Sequence[Entry]], name: str) -> Verdict:
    """Load a model as a client's request would, and unload it with what was loaded for it."""
    refusal = ""
    try:
        await control.load(name)
    except InferenceError as error:
        refusal = error.message
    found = entries(name)
    serving = [entry.serving for entry in found if entry.serving is not None]
    notes = [f"version {entry.version}: {entry.reason}" if serving else entry.reason for entry in found if entry.reason]
    if serving:
        (store, *_) = control.repositories.where(name)
        notes = [*(each.note for each in serving if each.note), *_differences(_loading(store, name)), *notes]
    verdict = Verdict(
        model=name,
        versions=tuple(each.spec.version for each in serving),
        runs_on=serving[0].provider.removesuffix("ExecutionProvider") if serving else "",
        notes=tuple(dict.fromkeys(notes)) or tuple(filter(None, [refusal])),
    )
    await control.unload(name, dependents=True)
    return verdict


def _judge_files(repositories: Repositories, name: str, judged: dict[str, Verdict]) -> Verdict:
    """Load a model from its only repository up to the point where an engine would open its files.

    judged: the verdicts so far, so that a step of many ensembles is judged once; those below an ensemble are added.
    """
    if name in judged:
        return judged[name]
    judged[name] = Verdict(model=name)  # stays so for an ensemble that is a step of itself
    try:
        where = repositories.where(name)
        if len(where) > 1:
            raise LoadFailed(f"model {name!r} is in more than one model repository")
        loading = _loading(where[0], name)
        for part in part_names(loading.configuration()):
            if not repositories.where(part):
                raise LoadFailed(f"needs model {part!r}, which is in none of the repositories: add its folder")
            if not _judge_files(repositories, part, judged).versions:
                raise LoadFailed(f"needs model {part!r}, which is refused: see its own line")
        found, notes = load_model(loading), _differences(loading)
        refused = {
            version: each.reason
            for version, each in found.items()
            if isinstance(each, LoadFailed) and not isinstance(each, _Unopened)
        }
        notes += [f"version {version}: {reason}" for version, reason in refused.items()]
        judged[name] = Verdict(model=name, versions=tuple(sorted(found.keys() - refused)), notes=tuple(notes))
    except LoadFailed as failure:
        judged[name] = Verdict(model=name, notes=(failure.reason,))
    return judged[name]


def _loading(store: ModelStore, name: str) -> Loading:
    return Loading(store, name, find_backend=_open_nothing, cores=1, models=1)


def _differences(loading: Loading) -> list[str]:
    """Return the settings of a model that have no effect here. Raises LoadFailed."""
    config = loading.configuration()
    return choose_versions(loading, config, loading.store.versions(loading.model))[1]


class _Unopened(LoadFailed):
    """The files of a version are as they have to be; no engine has seen them."""


def _open_nothing(name: str) -> Backend:
    """Return a backend that stands for the one called `name`, be it installed or not. Raises LoadFailed if this server
    has none of that name.
    """
    if name == PythonBackend.name:
        return _UnopenedCode()
    try:
        return _UnopenedCode() if isinstance(find_backend(name), ConfiguredBackend) else _UnopenedFile(name)
    except LoadFailed as failure:
        if not isinstance(failure.__cause__, ImportError | CompilerMissing):
            raise
        return _UnopenedFile(name)


class _UnopenedFile(Backend):
    """Judges the bytes of model files of the engine `name`."""

    def __init__(self, name: str) -> None:
        self._gpus = () if name in (forests.BACKEND, openvino.BACKEND) else MANY_GPUS

    def open(self, path: Path, options: EngineOptions) -> Session:
        if path.suffix == ".onnx":
            check_model_file(path, path.name)
        raise _Unopened("not opened")

    def gpus(self) -> Sequence[Gpu]:
        return self._gpus


class _UnopenedCode(ConfiguredBackend):
    """Runs no code."""

    def open(self, path: Path, options: EngineOptions) -> Session:
        raise _Unopened("not opened")

    def open_all(self, model: CodeModel) -> Sequence[RequestSession]:
        raise _Unopened("not opened")
