"""The model repository extension over HTTP and gRPC, and for Python models: index, load, unload."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec
from google.protobuf.message import Message

from oriel_inference.backends.python.frames import read_tensors
from oriel_inference.backends.python.messages import Inferred, Manage, ResultHead
from oriel_inference.backends.python.outcomes import code_of
from oriel_inference.backends.python.pb_errors import TritonError
from oriel_inference.backends.python.session import PythonSession
from oriel_inference.catalog import Entry
from oriel_inference.errors import InvalidRequest, NotSupported, ServerStopping, not_polled
from oriel_inference.model import base_name, is_served_name
from oriel_inference.servers.http_call import JSON, refuse
from oriel_inference.servers.large_json import LargeJson, Task
from oriel_inference.servers.load_body import FILE_PREFIX, decode_body, files_behind, from_base64
from oriel_inference.servers.statuses import as_inference_error
from oriel_inference.servers.surface import Surface
from oriel_wire.engine.buffered import Exchange
from oriel_wire.errors import BadMessage
from oriel_wire.v2.datatypes import quoted
from oriel_wire.v2.depth import check_depth
from oriel_wire.v2.metadata import parse_config_json
from oriel_wire.v2.proto import model_config_pb2 as pb
from oriel_wire.v2.proto import v2_pb2

MAX_FLAGS_BYTES = 64 << 10
MAX_FILES = 1000
POSTED = frozenset({"repository_index", "repository_load", "repository_unload"})
INLINE_LOAD_BYTES = 1 << 20

_ToBytes = Callable[[str, Any], bytes | memoryview]
_Override = tuple[pb.ModelConfig | None, dict[str, bytes | memoryview]]


def resolve(path: str) -> tuple[str, str, str] | None:
    """Match the paths of the repository; return kind, repository and model.

    They are /v2/repository[/R]/index, /v2/repository[/R]/models/M/load|unload, and /v2/repository/memory.
    """
    parts = path.split("/")
    if parts[:3] != ["", "v2", "repository"]:
        return None
    match parts[3:]:
        case ["index"]:
            return "repository_index", "", ""
        case ["memory"]:
            return "repository_memory", "", ""
        case [repository, "index"] if repository:
            return "repository_index", unquote(repository, errors="replace"), ""
        case ["models", name, "load" | "unload" as what]:
            repository, model = "", unquote(name, errors="replace")
        case [repository, "models", name, "load" | "unload" as what] if repository:
            repository, model = unquote(repository, errors="replace"), unquote(name, errors="replace")
        case _:
            return None
    return (f"repository_{what}", repository, model) if model else None


class HttpRepository:
    """Repository requests over HTTP. `start` takes one request; its answer comes later, unless the caller has left."""

    def __init__(self, surface: Surface, large_json: LargeJson) -> None:
        self._control = surface.control
        self._large_json = large_json

    def start(self, exchange: Exchange, kind: str, repository: str, model: str) -> None:
        """Start to answer. Raises InferenceError."""
        _only_unnamed(repository)
        work = {"repository_index": self._index, "repository_load": self._load, "repository_unload": self._unload}
        self._control.spawn(self._answer(exchange, work[kind](bytes(exchange.body), model)))

    async def _answer(self, exchange: Exchange, work: Coroutine[Any, Any, bytes]) -> None:
        try:
            body = await work
        except Exception as failure:
            refuse(exchange, as_inference_error(failure), [])
        else:
            exchange.respond(200, [JSON], body)

    async def _index(self, body: bytes, model: str) -> bytes:
        wanted = decode_body(_short(body))
        return msgspec.json.encode([_line(entry) for entry in await self._control.index(ready=wanted.ready)])

    async def _load(self, body: bytes, model: str) -> bytes:
        to_bytes: _ToBytes = from_base64
        if len(body) > INLINE_LOAD_BYTES:
            (body,), length = await self._large_json.convert(Task.LOAD, [body])
            to_bytes, body = files_behind(body, length), body[:length]
        # Even a small configuration takes some time, and the loop has requests to serve.
        config, files = await asyncio.to_thread(lambda: _read(model, decode_body(body).parameters, to_bytes))
        await self._control.load(model, config=config, files=files)
        return b""

    async def _unload(self, body: bytes, model: str) -> bytes:
        dependents = _unload_parameters(decode_body(_short(body)).parameters)
        await self._control.unload(_model(model), dependents=dependents)
        return b""


class GrpcRepository:
    """The three methods over gRPC; they raise InferenceError or BadMessage."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface

    def handlers(self) -> dict[str, Callable[[Any], Coroutine[Any, Any, Message]]]:
        """Return method name -> handler."""
        return {
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
        }

    async def _index(self, request: v2_pb2.RepositoryIndexRequest) -> Message:
        _only_unnamed(request.repository_name)
        if self._surface.stopping:  # a gateway takes a server as ready that lists its models
            raise ServerStopping()
        response = v2_pb2.RepositoryIndexResponse()
        for entry in await self._surface.control.index(ready=request.ready):
            response.models.add(**_line(entry))
        return response

    async def _load(self, request: v2_pb2.RepositoryModelLoadRequest) -> Message:
        _only_unnamed(request.repository_name)
        config, files = await asyncio.to_thread(lambda: _read(request.model_name, _values(request.parameters), _bytes))
        await self._surface.control.load(request.model_name, config=config, files=files)
        return v2_pb2.RepositoryModelLoadResponse()

    async def _unload(self, request: v2_pb2.RepositoryModelUnloadRequest) -> Message:
        _only_unnamed(request.repository_name)
        dependents = _unload_parameters(_values(request.parameters))
        await self._surface.control.unload(_model(request.model_name), dependents=dependents)
        return v2_pb2.RepositoryModelUnloadResponse()


class ModelsRepository:
    """Requests of Python models to load and unload others. One that a model makes while it starts holds its own load
    up, so it must not wait for that load.
    """

    def __init__(self, surface: Surface) -> None:
        self._surface = surface
        self._waits: list[tuple[str, str]] = []  # a model that starts, and the one that it waits for

    def __call__(self, session: PythonSession, message: Manage, body: memoryview) -> None:
        """Begin to do what the message says; the session gets the answer."""
        self._surface.control.spawn(self._answer(session, message, body))

    async def _answer(self, session: PythonSession, message: Manage, body: memoryview) -> None:
        pid, head = session.pid, ResultHead(error=(TritonError.UNAVAILABLE, ServerStopping().message))
        try:
            head = ResultHead(parameters={"ready": await self._run(session, message, body)})
        except Exception as failure:
            refusal = as_inference_error(failure)
            head.error = code_of(refusal), refusal.message
        finally:
            if session.pid == pid:
                session.inferred(Inferred(message.id, head, True))

    async def _run(self, session: PythonSession, message: Manage, body: memoryview) -> bool:
        caller, model = session.launch.model, message.model
        if message.action == "ready":
            return self._surface.catalog.serves(model, message.version)
        if not session.starting:
            return await self._manage(message, body)
        control = self._surface.control
        steps = await control.members(model) if message.action == "load" or message.dependents else ()
        waits = [(caller, base_name(each)) for each in {model, *steps}]
        if any(self._waits_for(each, caller) for _, each in waits):
            raise InvalidRequest(f"model {caller!r} loads {quoted(model)} while it starts: it would wait for itself")
        with control.rollout.slots.lent(caller):
            self._waits += waits
            try:
                return await self._manage(message, body)
            finally:
                for each in waits:
                    self._waits.remove(each)

    def _waits_for(self, model: str, other: str) -> bool:
        """Return whether a model is another one, or its load waits for that one."""
        return model == other or any(self._waits_for(each, other) for caller, each in self._waits if caller == model)

    async def _manage(self, message: Manage, body: memoryview) -> bool:
        control = self._surface.control
        if message.action == "unload":
            await control.unload(_model(message.model), dependents=message.dependents)
            return True
        parameters: dict[str, Any] = {name: array.data for name, _, array in read_tensors(message.files, body)[0]}
        if message.config:
            parameters["config"] = message.config
        config, files = await asyncio.to_thread(lambda: _read(message.model, parameters, lambda _, data: data))
        await control.load(message.model, config=config, files=files)
        return True


def _line(entry: Entry | str) -> dict[str, str]:
    if isinstance(entry, str):
        return {"name": entry}
    version = {"version": entry.shown_version} if entry.shown_version else {}
    return {"name": entry.name, **version, "state": entry.state.value, "reason": entry.reason}


def _only_unnamed(repository: str) -> None:
    if repository:
        raise NotSupported("'repository_name' specification is not supported, leave it out")


def _model(name: str) -> str:
    if not is_served_name(name):
        raise InvalidRequest("model_name is missing or not a valid name")
    return name


def _short(body: bytes) -> bytes:
    """Decode a body that holds only flags and names, on the loop."""
    check_depth(body[:MAX_FLAGS_BYTES])
    if len(body) > MAX_FLAGS_BYTES:
        raise InvalidRequest(f"the body has {len(body)} bytes, at most {MAX_FLAGS_BYTES} are accepted here")
    return body


def _values(parameters: Mapping[str, v2_pb2.ModelRepositoryParameter]) -> dict[str, Any]:
    return {
        name: getattr(value, choice)
        for name, value in parameters.items()
        if (choice := value.WhichOneof("parameter_choice")) is not None
    }


def _read(model: str, parameters: Mapping[str, Any], to_bytes: _ToBytes) -> _Override:
    """Return the configuration and the files that came with the request to load a model. Raises InvalidRequest."""
    try:
        _model(model)
        return _override(parameters, to_bytes)
    except (InvalidRequest, BadMessage) as error:
        raise InvalidRequest(f"{not_polled(model)}: {error.message}") from error


def _override(parameters: Mapping[str, Any], to_bytes: _ToBytes) -> _Override:
    config: pb.ModelConfig | None = None
    files: dict[str, bytes | memoryview] = {}
    for name, value in parameters.items():
        if name == "config":
            if not isinstance(value, str):
                raise InvalidRequest("parameter 'config' must be a string that holds JSON")
            config = parse_config_json(value)
        elif name.startswith(FILE_PREFIX):
            files[name.removeprefix(FILE_PREFIX)] = to_bytes(name, value)
        else:
            raise InvalidRequest(f"parameter {name[:100]!r} is not known: use config and file:<version>/<path>")
    if files and config is None:
        raise InvalidRequest("files can only be given together with parameter 'config'")
    if len(files) > MAX_FILES:
        raise InvalidRequest(f"more than {MAX_FILES} files are given")
    return config, files


def _bytes(name: str, value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise InvalidRequest(f"parameter {name[:100]!r} must be given as bytes")
    return value


def _unload_parameters(parameters: Mapping[str, Any]) -> bool:
    """Return whether the models of an ensemble's steps are to be unloaded too."""
    for name, value in parameters.items():
        if name != "unload_dependents":
            raise InvalidRequest(f"parameter {name[:100]!r} is not known: use unload_dependents")
        if not isinstance(value, bool):
            raise InvalidRequest("parameter 'unload_dependents' must be true or false")
    return bool(parameters.get("unload_dependents", False))
