"""The process of one instance of a Python model: `python -m oriel_inference.backends.python.child SERVER WORK CONTROL`.

It imports the model, lets it complete its configuration if it wants to, initialises it, executes one batch after
another, and finalises it. Exceptions of user code are reported to the server; any other error ends the process.
"""

import asyncio
import gc
import importlib.util
import inspect
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from oriel_inference.backends import without_folders
from oriel_inference.backends.python import pb_utils
from oriel_inference.backends.python.frames import read_tensors
from oriel_inference.backends.python.messages import (
    Answers,
    Execute,
    Failed,
    Finalize,
    Finalized,
    Initialize,
    Load,
    Loaded,
    Ready,
    Respond,
    ResultHead,
    Returned,
)
from oriel_inference.backends.python.pb_errors import TritonError, TritonModelException, printed
from oriel_inference.backends.python.pb_request import InferenceResponse, ServedRequest, encode_response
from oriel_inference.backends.python.pb_tensor import Tensor
from oriel_inference.backends.python.runtime import Runtime, connect
from oriel_wire.process.messages import Buffer, FrameError
from oriel_wire.process.start import end_with_parent

MODULE = "triton_python_backend_utils"
CLASS = "TritonPythonModel"
_INSTALL = "install it beside the server, or into an environment that EXECUTION_ENV_PATH names: docs/python-models.md"
_USER_ERRORS = (Exception, SystemExit, asyncio.CancelledError)

Result = tuple[ResultHead, list[Buffer]]


def main() -> None:
    """Serve until the server asks for the end or is gone."""
    server, work, control = (int(each) for each in sys.argv[1:4])
    end_with_parent(server)
    _restore_environment()
    for descriptor in (work, control):
        os.set_inheritable(descriptor, False)
    runtime = Runtime(socket.socket(fileno=work), socket.socket(fileno=control))
    load, _ = runtime.next()
    assert isinstance(load, Load)
    sys.argv = [load.file]
    try:
        instance = Instance(runtime, load)
        runtime.send(Loaded(instance.completed() if load.complete else None))
        initialize, _ = runtime.next()
        assert isinstance(initialize, Initialize)
        instance.initialize(initialize)
    except _USER_ERRORS as error:
        reason = printed(_where(error, Path(load.file)) + _last_line(error))
        runtime.send(Failed(reason, printed(traceback.format_exc())[-8000:]))
        sys.exit(1)
    gc.collect()
    gc.freeze()  # the model's objects live until the end: no collection need walk them
    runtime.send(Ready())
    instance.serve()


class Instance:
    """The user's class and its object."""

    def __init__(self, runtime: Runtime, load: Load) -> None:
        self._runtime = runtime
        self._name = load.name
        self._version = int(load.version)
        self._config = load.config
        self._decoupled = False
        self._model: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        runtime.max_body_bytes = load.max_body_bytes
        folder = Path(load.file).parent
        pb_utils.connect(str(folder))
        connect(runtime)
        sys.modules[MODULE] = pb_utils
        # Appended behind the installed packages: the model's own files replace none of them.
        sys.path += [str(folder), str(folder.parent)]
        module = _import(Path(load.file), load.version)
        found = getattr(module, CLASS, None)
        if not inspect.isclass(found):
            raise TritonModelException(f"{Path(load.file).name} has no class {CLASS}")
        self._class: Any = found
        if not hasattr(self._class, "execute"):
            raise TritonModelException(f"{CLASS} has no function execute")

    def completed(self) -> str | None:
        """Return the configuration as the model completes it; None if the model does not complete it."""
        complete = getattr(self._class, "auto_complete_config", None)
        if complete is None:
            return None
        found = complete(pb_utils.ModelConfig(self._config))
        if not isinstance(found, pb_utils.ModelConfig):
            raise TritonModelException("auto_complete_config must return the pb_utils.ModelConfig it was given")
        return json.dumps(found.as_dict())

    def initialize(self, message: Initialize) -> None:
        self._decoupled = message.decoupled
        batching = json.loads(message.args["model_config"]).get("sequence_batching", {})
        self._runtime.iterative = bool(batching.get("iterative_sequence"))
        self._model = self._class()
        if hasattr(self._model, "initialize"):
            self._model.initialize(message.args)

    def serve(self) -> None:
        """Handle one message after another."""
        runtime = self._runtime
        run = self._stream if self._decoupled else self._answer
        while True:
            message, body = runtime.next()
            match message:
                case Execute():
                    runtime.executing = True
                    run(message, body)
                    # Responses of a decoupled model may still need other models.
                    runtime.executing = self._decoupled
                    del body
                case Finalize():
                    self._finalize()
                    return

    def _answer(self, message: Execute, body: memoryview) -> None:
        requests = self._requests(message, body)
        began = time.monotonic()
        try:
            responses = self._model.execute(list(requests))
            if inspect.iscoroutine(responses):
                responses = self._own_loop().run_until_complete(responses)
            results = _results(requests, responses)
        except _USER_ERRORS as error:
            results = [(self._failure(error), [])] * len(requests)
        ended = time.monotonic()
        answers = Answers(message.batch, began, ended, [head for head, _ in results])
        pieces = [piece for _, each in results for piece in each]
        try:
            self._runtime.send(answers, pieces)
        except FrameError as error:
            head = ResultHead(error=(TritonError.INTERNAL, f"the model's answer is too large: {error}"))
            self._runtime.send(Answers(message.batch, began, ended, [head] * len(requests)))

    def _stream(self, message: Execute, body: memoryview) -> None:
        requests = self._requests(message, body)
        try:
            returned = self._model.execute(list(requests))
            if inspect.iscoroutine(returned):
                asyncio.run_coroutine_threadsafe(self._watched(returned, requests), self._shared_loop())
            elif returned is not None:
                raise TritonModelException(
                    "execute of a decoupled model must return None and send its responses with get_response_sender()"
                )
            else:
                self._reschedule(requests)
        except _USER_ERRORS as error:
            self._end(requests, error)
        del requests  # requests that the model has not kept end here
        self._runtime.send(Returned(message.batch))

    async def _watched(self, work: Coroutine[Any, Any, Any], requests: Sequence[ServedRequest]) -> None:
        try:
            await work
            self._reschedule(requests)
        except _USER_ERRORS as error:
            self._end(requests, error)

    def _reschedule(self, requests: Sequence[ServedRequest]) -> None:
        for request in requests:
            pending = request.pending
            if pending.again and not pending.final:
                pending.final = True
                self._runtime.send(Respond(pending.head.id, ResultHead(again=True), True))

    def _end(self, requests: Sequence[ServedRequest], error: BaseException) -> None:
        head = self._failure(error)
        for request in requests:
            if not request.pending.final:
                request.pending.respond(head, [], final=True)

    def _requests(self, message: Execute, body: memoryview) -> list[ServedRequest]:
        requests, at = [], 0
        for pending in self._runtime.open(message.requests, decoupled=self._decoupled):
            parts, at = read_tensors(pending.head.inputs, body, at)
            requests.append(ServedRequest(pending, list(map(Tensor.received, parts)), self._name, self._version))
        return requests

    def _finalize(self) -> None:
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        except _USER_ERRORS:
            self._runtime.say(logging.ERROR, f"finalize failed:\n{traceback.format_exc()[-8000:]}")
        sys.stdout.flush()
        self._runtime.say_left_out()
        self._runtime.send(Finalized())

    def _failure(self, error: BaseException) -> ResultHead:
        """Return the error for clients; the log gets the traceback. Only a TritonModelException has text for them:
        that of other errors may quote what the model knows, such as addresses and passwords.
        """
        self._runtime.say(logging.ERROR, f"execute failed:\n{''.join(traceback.format_exception(error))[-8000:]}")
        text = without_folders(printed(error))[:400] if isinstance(error, TritonModelException) else ""
        return ResultHead(error=(TritonError.INTERNAL, text or "the model failed: the server's log says why"))

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of the main thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop

    def _shared_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop, in a thread of its own, on which all coroutines of a decoupled model run."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="oriel-execute", daemon=True).start()
        return self._loop


def _results(requests: Sequence[ServedRequest], responses: Any) -> list[Result]:
    """Return one result per request. Raises TritonModelException if `execute` returned something else."""
    if responses is None:
        responses = [None] * len(requests)
    if not isinstance(responses, list | tuple):
        raise TritonModelException("execute must return a list with one InferenceResponse per request")
    if len(responses) != len(requests):
        raise TritonModelException(f"execute returned {len(responses)} responses for {len(requests)} requests")
    return [_result(request, response) for request, response in zip(requests, responses, strict=True)]


def _result(request: ServedRequest, response: Any) -> Result:
    pending = request.pending
    if response is None and pending.again:
        return ResultHead(again=True), []
    if response is None and pending.reply is not None:
        return pending.reply
    if isinstance(response, InferenceResponse):
        return encode_response(response, pending)
    what = "None" if response is None else "something else"
    text = f"execute must return an InferenceResponse for every request, for this one it returned {what}"
    return ResultHead(error=(TritonError.INTERNAL, text)), []


def _import(file: Path, version: str) -> types.ModuleType:
    """Import `<version>.model`, so that `from . import x` finds the files beside it."""
    package = types.ModuleType(version)
    package.__path__ = [str(file.parent)]
    sys.modules[version] = package
    name = f"{version}.{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise TritonModelException(f"{file.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _where(error: BaseException, file: Path) -> str:
    """Return the model's own file and line at which loading failed; "" if it failed in none of its files."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{Path(error.filename).name}, line {error.lineno}: "
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(file.parents[1])
    ]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}: " if own else ""


def _last_line(error: BaseException) -> str:
    """Return the last line of the traceback without the class of the exception; the log has all of it."""
    line = without_folders(printed(error))[:400] or "see the server log"
    # The names of the model's own modules begin with its version.
    foreign = isinstance(error, ModuleNotFoundError) and not (error.name or "0")[0].isdigit()
    return f"{line}: {_INSTALL}" if foreign else line


def _restore_environment() -> None:
    original = os.environ.pop("ORIEL_PYTHONPATH", "")
    os.environ.pop("PYTHONPATH", None)
    if original:
        os.environ["PYTHONPATH"] = original
    # The repository is watched for changes and may be read-only, so no bytecode is written.
    sys.dont_write_bytecode = True


if __name__ == "__main__":
    main()
