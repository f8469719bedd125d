"""One run of `oriel logic dev`: the processes beside the server, and its output."""

import io
import logging
import socket
import sys
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from oriel_logic.deploy.samples import sample_file
from oriel_logic.deploy.updates import Updates
from oriel_logic.dev.beside import HOST, Address, free_ports, inference_server, models_of
from oriel_logic.dev.console import (
    Shown,
    TracebackOfOwnFiles,
    banner,
    model_lines,
    place_of,
    service_lines,
    shown_path,
)
from oriel_logic.dev.fakes import FakeServers
from oriel_logic.dev.target import Target
from oriel_logic.loading.folder_config import BadConfig
from oriel_logic.loading.listing import read_listing
from oriel_logic.loading.sources import HandlerFile
from oriel_logic.server.registry import Registry
from oriel_logic.server.releases import Release
from oriel_wire.errors import StartFailed
from oriel_wire.process.process import listen

NEXT_PORTS = 20
TRIES = 4  # attempts to list the models of a server that was named or started here


class Session:
    """A run of `oriel logic dev`.

    inference: servers that run already. repository: models to start a server with. Without both, the target's fakes
    answer.

    may_move: True if another port may be used if the one in the settings is taken.
    """

    def __init__(self, target: Target, *, inference: tuple[Address, ...], repository: Path | None) -> None:
        """Raises StartFailed if the fakes cannot be loaded."""
        self._target = target
        self._repository = repository
        self._ports = free_ports() if repository is not None else {}
        self.addresses = inference if not self._ports else ((HOST, self._ports["http"]),)
        self.grpc_addresses: tuple[Address, ...] = ((HOST, self._ports["grpc"]),) if self._ports else ()
        self.may_move = False
        self._registry: Registry | None = None
        self._url = ""
        self._saves: dict[str, int] = {}  # number of saves by origin
        self._reloading: set[str] = set()  # origins whose latest save has neither taken over nor failed
        self._fakes = target.fakes if not self.addresses else ()
        self.models = FakeServers(self._fakes) if self._fakes else None

    def configure_logging(self) -> None:
        """Log warnings and errors to stderr, for a person; output of handlers appears at once, also in a file."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(TracebackOfOwnFiles(self._target.root))
        logging.getLogger().handlers[:] = [handler]
        logging.getLogger().setLevel(logging.WARNING)
        logging.getLogger("oriel_logic.dev").setLevel(logging.INFO)
        warnings.filterwarnings("ignore", "coroutine .* was never awaited")
        for logger in ("oriel_logic.server.registry", "oriel_logic.loading.handlers"):
            logging.getLogger(logger).setLevel(logging.CRITICAL)

    def listen(self, host: str, port: int, what: str) -> socket.socket:
        """Open the socket of the services. Raises StartFailed."""
        for each in range(port, port + NEXT_PORTS) if self.may_move else ():
            with suppress(StartFailed):
                return listen(host, each, what)
        return listen(host, port, what)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the inference server of the repository, if there is one, while the block lasts. Raises StartFailed."""
        if self._repository is None:
            yield
            return
        async with inference_server(self._repository, self._ports):
            yield

    async def print_addresses(self, registry: Registry, updates: Updates, url: str) -> None:
        """Print the addresses; the services have been set up."""
        self._registry, self._url = registry, url
        say(banner(url, [self._shown(facts) for facts in registry.describe()], await self._models()))
        registry.on_change = self._report
        updates.seen = self._seen

    async def try_samples(self, try_one: Callable[[Release], Awaitable[tuple[str, str]]]) -> None:
        """Print for each service whether it answers its sample. try_one: returns (the sample's label, the error)."""
        assert self._registry is not None
        for release in self._registry.releases():
            sample, problem = await try_one(release)
            if problem:
                say(place_of(problem, file_of(release.file)))
            elif sample:
                say(f"{release.name} answers {sample}")

    def _seen(self, file: HandlerFile) -> None:
        """Record a save; whether it can take over is known later."""
        assert self._registry is not None
        name = self._registry.name_of(file.origin)
        if not name:
            return  # a new file: its result is printed, and it may have no service
        save = self._saves[file.origin] = self._saves.get(file.origin, 0) + 1
        before = f"save {save - 1} is superseded, " if file.origin in self._reloading else ""
        self._reloading.add(file.origin)
        say(f"{now()} {name}: {before}reloading (save {save})")

    def _report(self, file: HandlerFile, name: str, problem: str) -> None:
        """Print that a save took over, or why it cannot."""
        assert self._registry is not None
        serving = self._registry.holder(name, file.version)
        save = f" (save {self._saves[file.origin]})" if file.origin in self._reloading else ""
        self._reloading.discard(file.origin)
        if problem:
            outcome = "the old code keeps serving" if serving is not None else "nothing serves it"
            say(f"{now()} {place_of(problem, file_of(file))}; {outcome}{save}")
        elif serving is not None and serving.number == 1:
            say("\n".join(service_lines(self._url, self._shown(self._registry.describe_one(name)))))
        else:
            say(f"{now()} {name}: reloaded{save}")

    def _shown(self, facts: Mapping[str, Any]) -> Shown:
        """Convert the registry's description of one service."""
        assert self._registry is not None
        name = str(facts["name"])
        path, sample = None, None
        for source in read_listing([self._target.root]).sources.values():
            if source.file.name == name:
                path = source.file.path
                with suppress(BadConfig):
                    sample = sample_file(source, name)
        return Shown(
            name=name,
            file=shown_path(path) if path is not None else str(facts["file"]),
            definition=next((each for each in self._registry.definitions() if each.name == name), None),
            sample=shown_path(sample) if sample is not None else "",
            problem=str(facts.get("problem", "")),
        )

    async def _models(self) -> str:
        if self.models is not None:
            return f"{', '.join(self.models.names) or 'none'}: faked by {', '.join(map(shown_path, self._fakes))}"
        address = self.addresses[0] if self.addresses else (HOST, 8000)
        where = f"http://{address[0]}:{address[1]}"
        found = None
        for _ in range(TRIES if self.addresses else 1):  # a server that was named, or started here, may be slow
            found = await models_of(address)
            if found is not None:
                break
        if found is None:
            return (
                f"nobody answers at {where}: write a fakes.py, or pass --model-repository DIR or --inference HOST:PORT"
            )
        return model_lines(found, where)


def now() -> str:
    return time.strftime("%H:%M:%S")


def file_of(file: HandlerFile) -> str:
    """Return a file's path for messages, or its label without one."""
    return shown_path(file.path) if file.path is not None else file.label


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
