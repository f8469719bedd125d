"""The backend `language`: opens the file of a language model as one session, whose process is its own."""

import asyncio
import concurrent.futures
from collections.abc import Mapping, Sequence
from pathlib import Path
from weakref import WeakSet

import msgspec

from oriel_inference.backends import CodeModel, ConfiguredBackend, Execution, RequestSession
from oriel_inference.backends.python.backend import START_KEY, seconds, tensor_infos
from oriel_inference.backends.python.launch import Launch, PythonLimits
from oriel_inference.errors import BackendFailed, LoadFailed
from oriel_inference.language.decoder import Decoder
from oriel_inference.language.engine import Facts, Options
from oriel_inference.language.messages import Load
from oriel_inference.model import EngineOptions
from oriel_wire.v2.messages import Array
from oriel_wire.v2.proto import model_config_pb2 as pb

ENGINE, CACHE, RUNNING, STEP_TOKENS = "oriel.engine", "oriel.cache_mb", "oriel.max_running", "oriel.step_tokens"


class LanguageSession(RequestSession):
    """The process of a language model. Its scheduler adds sequences to the decoder; nothing is executed in batches.

    decoder: belongs to the loop. options: those with which the engine loaded the model.
    """

    def __init__(self, decoder: Decoder, options: Options, config: pb.ModelConfig) -> None:
        self.decoder = decoder
        self.options = options
        self.inputs, self.outputs = tensor_infos(config, config.input), tensor_infos(config, config.output)
        self.provider = decoder.facts.engine
        self._loop = asyncio.get_running_loop()

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        raise BackendFailed("a language model is not executed in batches")

    def execute(self, execution: Execution) -> None:
        raise AssertionError("a language model has a scheduler of its own")

    def caller_left(self, execution: Execution, index: int) -> None:
        pass

    def memory_bytes(self) -> int:
        return self.decoder.memory_bytes()

    def close(self) -> None:
        concurrent.futures.wait([asyncio.run_coroutine_threadsafe(self.decoder.close(), self._loop)])


class Language(ConfiguredBackend):
    """Opens language models, each as one session.

    loop: the loop that their decoders belong to; without one, nothing can be opened. `open_all` blocks and is for other
    threads.
    """

    name = "language"

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self._starting: set[Decoder] = set()
        self._opened: WeakSet[Decoder] = WeakSet()  # the loop refers to those that have a process
        self._closed = False

    def open(self, path: Path, options: EngineOptions) -> LanguageSession:
        raise LoadFailed("a language model needs a configuration")

    def open_all(self, model: CodeModel) -> Sequence[LanguageSession]:
        if self._loop is None:
            raise LoadFailed("a language model runs in a process of an inference server only: load it there")
        future = asyncio.run_coroutine_threadsafe(self._open(model), self._loop)
        concurrent.futures.wait([future])
        return [future.result()]

    def stop(self) -> None:
        """Refuse further opens and fail those in progress. Called on the loop."""
        self._closed = True
        for decoder in self._starting:
            decoder.kill("the server is stopping")

    async def close(self) -> None:
        """Close what nobody else has closed: a cancelled load leaves behind what it had opened."""
        await asyncio.gather(*(decoder.close() for decoder in tuple(self._opened)))

    async def _open(self, model: CodeModel) -> LanguageSession:
        if self._closed:
            raise LoadFailed("the server is stopping")
        entries, config = model.options.session_entries, model.config
        options = Options(
            threads=model.options.intra_op_threads,
            cache_mb=int(entries[CACHE]),
            max_running=int(entries[RUNNING]),
            step_tokens=int(entries[STEP_TOKENS]),
            settings={key: value.string_value for key, value in config.parameters.items()},
        )
        limits = PythonLimits(start_s=seconds(config, START_KEY, PythonLimits().start_s))
        launch = Launch(model=config.name, threads=options.threads)
        decoder = Decoder(launch, Load(entries[ENGINE], str(model.path), options), limits)
        self._opened.add(decoder)
        self._starting.add(decoder)
        try:
            _show(config, await decoder.start())
            model.judge(config)
        except BaseException:
            await decoder.close()
            raise
        finally:
            self._starting.discard(decoder)
        return LanguageSession(decoder, options, config)


def _show(config: pb.ModelConfig, facts: Facts) -> None:
    """Write what clients have to know of the model into its configuration."""
    shown = {
        "oriel.chat_template": facts.chat_template,
        "oriel.bos_token": facts.bos,
        "oriel.eos_token": facts.eos,
        "oriel.control_tokens": msgspec.json.encode(list(facts.control_tokens)).decode(),
        "oriel.context": str(facts.context),
    }
    for key, text in shown.items():
        config.parameters[key].string_value = text
