"""Opens a folder with `model.py` as running instances."""

import asyncio
import concurrent.futures
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from oriel_inference.backends import CodeModel, ConfiguredBackend
from oriel_inference.backends.hidden_tensors import hidden_inputs
from oriel_inference.backends.python.environments import Environments
from oriel_inference.backends.python.launch import Launch, PythonLimits
from oriel_inference.backends.python.model_metrics import Holdings, ModelMetrics
from oriel_inference.backends.python.session import PythonSession, Scripting
from oriel_inference.errors import LoadFailed
from oriel_inference.model import EngineOptions, TensorInfo
from oriel_wire.errors import BadMessage
from oriel_wire.v2.datatypes import from_config_name
from oriel_wire.v2.metadata import message_json, parse_config_json
from oriel_wire.v2.proto import model_config_pb2 as pb

_T = TypeVar("_T")
_KINDS = {pb.ModelInstanceGroup.KIND_GPU: "GPU", pb.ModelInstanceGroup.KIND_MODEL: "MODEL"}
START_KEY = "oriel.start_timeout_s"
GRACE_KEY = "oriel.kill_after_s"
MAX_START_S = 3600.0
STARTS_AT_ONCE = 8  # instances of one model: each has its time to start while the others take the processor too


class PythonBackend(ConfiguredBackend):
    """The backend of Python models. It belongs to the loop it is created on; its `open_*` methods block and are for
    other threads.

    scripting: runs the requests that models make to other models.
    environment: names of the server's variables that models get in addition to the usual ones.
    """

    name = "python"

    def __init__(
        self, scripting: Scripting, limits: PythonLimits | None = None, *, environment: Sequence[str] = ()
    ) -> None:
        self.metrics = ModelMetrics()
        self._environments = Environments()
        self._loop = asyncio.get_running_loop()
        self._scripting = scripting
        self._limits = limits or PythonLimits()
        self._environment = tuple(environment)
        self._starting: set[PythonSession] = set()
        self._opened: WeakSet[PythonSession] = WeakSet()  # the loop refers to those that have a process
        self._closed = False

    def open(self, path: Path, options: EngineOptions) -> PythonSession:
        raise LoadFailed("a Python model needs a configuration")

    def open_all(self, model: CodeModel) -> Sequence[PythonSession]:
        python = self._environments.interpreter(model.config, model.path.parent.parent)
        return self._wait(self._open_all(replace(model, options=replace(model.options, python=python))))

    def stop(self) -> None:
        """Refuse further opens and fail those in progress. Called on the loop."""
        self._closed = True
        for session in self._starting:
            session.kill("the server is stopping")

    async def close(self) -> None:
        """Close what nobody else has closed: a cancelled load leaves behind what it had opened."""
        await asyncio.gather(*(session.finalise() for session in tuple(self._opened)))
        await asyncio.to_thread(self._environments.close)

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        concurrent.futures.wait([future])
        return future.result()

    async def _open_all(self, model: CodeModel) -> Sequence[PythonSession]:
        limits = self._limited(model.config)
        sessions = [self._session(self._launch(model, 0), limits)]
        try:
            completed = await self._load(sessions[0], complete=True)
            if completed is not None:
                await sessions[0].finalise()  # the process that found this out had another configuration
                try:
                    model.config.CopyFrom(parse_config_json(completed))
                except BadMessage as error:
                    raise LoadFailed(f"auto_complete_config of the model: {error.message}") from error
            launches = [self._launch(model, index) for index in range(model.judge(model.config))]
            if completed is None:
                sessions[0].adopt(launches[0])
            else:
                sessions.clear()
            sessions += [self._session(launch, limits) for launch in launches[len(sessions) :]]
            slots = asyncio.Semaphore(STARTS_AT_ONCE)
            async with asyncio.TaskGroup() as starting:
                for session in sessions:
                    starting.create_task(self._start(session, slots))
        except BaseException as error:
            await asyncio.gather(*(session.finalise() for session in sessions))
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from error
            raise
        for session in sessions:
            session.siblings = sessions
        return sessions

    async def _start(self, session: PythonSession, slots: asyncio.Semaphore) -> None:
        async with slots:
            if session.pid is None:
                await self._load(session)
            self._starting.add(session)
            try:
                await session.initialize()
            finally:
                self._starting.discard(session)

    def _session(self, launch: Launch, limits: PythonLimits) -> PythonSession:
        session = PythonSession(launch, limits, self._scripting, Holdings(self.metrics, launch.model))
        self._opened.add(session)
        return session

    async def _load(self, session: PythonSession, *, complete: bool = False) -> str | None:
        if self._closed:
            raise LoadFailed("the server is stopping")
        self._starting.add(session)
        try:
            return await session.load(complete=complete)
        finally:
            self._starting.discard(session)

    def _launch(self, model: CodeModel, index: int) -> Launch:
        config, path, version = model.config, model.path, str(model.version)
        kind, device, name = _instance(config, index)
        text = message_json(config).decode()
        return Launch(
            file=str(path),
            model=config.name,
            version=version,
            config=text,
            args={
                "model_config": text,
                "model_instance_kind": kind,
                "model_instance_name": name,
                "model_instance_device_id": device,
                "model_repository": str(path.parent.parent),
                "model_version": version,
                "model_name": config.name,
            },
            decoupled=config.model_transaction_policy.decoupled,
            python=model.options.python,
            threads=model.options.intra_op_threads,
            environment=self._environment,
            inputs=tensor_infos(config, [*config.input, *hidden_inputs(config)]),
            outputs=tensor_infos(config, config.output),
        )

    def _limited(self, config: pb.ModelConfig) -> PythonLimits:
        return replace(
            self._limits,
            start_s=seconds(config, START_KEY, self._limits.start_s),
            grace_s=seconds(config, GRACE_KEY, self._limits.grace_s),
        )


def _instance(config: pb.ModelConfig, index: int) -> tuple[str, str, str]:
    """Return kind, device and name of an instance, counted over all groups."""
    at = 0
    for number, group in enumerate(config.instance_group):
        devices = list(group.gpus) or [0]
        for device in devices:
            count = group.count or 1
            if index < at + count:
                name = f"{group.name or f'{config.name}_{number}'}_{index - at}"
                return _KINDS.get(group.kind, "CPU"), str(device), name
            at += count
    return "CPU", "0", f"{config.name}_0_{index}"


def tensor_infos(config: pb.ModelConfig, tensors: Any) -> tuple[TensorInfo, ...]:
    """Return inputs or outputs of a configuration as a runtime sees them."""
    batch = (-1,) if config.max_batch_size > 0 else ()
    return tuple(
        TensorInfo(
            name=each.name,
            datatype=_datatype(each),
            shape=(*batch, *(each.reshape.shape if each.HasField("reshape") else each.dims)),
            optional=getattr(each, "optional", False),
        )
        for each in tensors
    )


def _datatype(tensor: Any) -> str:
    try:
        return from_config_name(pb.DataType.Name(tensor.data_type))
    except (BadMessage, ValueError):
        return ""  # refused when the completed configuration is checked


def seconds(config: pb.ModelConfig, key: str, default: float) -> float:
    """Return the value of a parameter that is a time. Raises LoadFailed."""
    if key not in config.parameters:
        return default
    text = config.parameters[key].string_value
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= MAX_START_S:
        raise LoadFailed(f"parameters[{key!r}] must be a number of seconds, at most {MAX_START_S:g}")
    return value
