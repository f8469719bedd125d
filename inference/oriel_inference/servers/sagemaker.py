"""SageMaker's endpoints with many models: it unpacks archives below /opt/ml/models, and has them loaded and unloaded.

Each archive is a repository of its own while it is loaded. The model that it stands for is called by the archive's name
(`X-Amzn-SageMaker-Target-Model`), whatever its folder is called; the models of an ensemble's steps are told from those
of other archives by the number of the repository.
"""

import asyncio
import os
from itertools import count
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from oriel_inference.errors import ControlRefused, InvalidRequest, LoadFailed, LoadRefused, Outcome, UnknownModel
from oriel_inference.model import is_model_name, is_version
from oriel_inference.models.control import ModelControl
from oriel_inference.repository.config import CONFIG_FILE, read_config
from oriel_inference.repository.ensembles import part_names
from oriel_inference.servers.http_call import answer, json_object, refuse
from oriel_inference.servers.statuses import as_inference_error
from oriel_inference.stores.local import LocalStore
from oriel_wire.engine.buffered import Exchange
from oriel_wire.h1.request import RequestHead

MODELS = Path("/opt/ml/models")
MAX_MODELS = 1000
_STATUSES = {Outcome.UNKNOWN_MODEL: 404, Outcome.CONTROL_REFUSED: 409, Outcome.MODEL_MEMORY_FULL: 507}
_NO_MEMORY = ("out of memory", "budget of memory", "allocate memory", "bad_alloc", "memoryerror", "no space left")


class SagemakerModels:
    """The models that SageMaker has loaded, by the names that it gives them. Single writer: the loop."""

    def __init__(self, control: ModelControl) -> None:
        self._control = control
        self._loaded: dict[str, tuple[str, str, LocalStore]] = {}  # name in the catalog, folder, repository
        self._taken: set[str] = set()  # names of both kinds, also of models that come or go
        self._numbers = count(1 << 20)  # behind those of the repositories of the start

    def path(self, head: RequestHead) -> str:
        """Return the path of v2 for a call of a model; "" if it is not loaded. Else "models/NAME", or "models/"."""
        name, slash, action = head.path.removeprefix("/models").removeprefix("/").partition("/")
        if not slash:
            return f"models/{name}"
        found = self._loaded.get(unquote(name)) if action == "invoke" else None
        return "" if found is None else f"/v2/models/{quote(found[0], safe='')}/infer"

    async def answer(self, exchange: Exchange, name: str) -> None:
        """Answer one request about the model of that name, or about all if it is ""."""
        head, body = exchange.head, b""
        try:
            if name and name not in self._loaded:
                raise UnknownModel("SageMaker has loaded no model of that name")
            if head.method == "POST":
                wanted = json_object(bytes(exchange.body)) | {"target": head.get("x-amzn-sagemaker-target-model")}
                await self._load(*[str(wanted.get(key) or "") for key in ("model_name", "url", "target")])
            elif head.method == "DELETE":
                target, _, store = self._loaded.pop(name)
                await self._control.unmount(store)
                self._taken -= {name, target}
            else:
                lines = {key: {"modelName": key, "modelUrl": url} for key, (_, url, _) in self._loaded.items()}
                body = msgspec.json.encode(lines[name] if name else {"models": list(lines.values())})
        except Exception as failure:
            error = as_inference_error(LoadRefused(failure.reason) if isinstance(failure, LoadFailed) else failure)
            lacks = any(each in error.message.lower() for each in _NO_MEMORY)
            refuse(exchange, error, (), 507 if lacks else _STATUSES.get(error.outcome, 400))
        else:
            answer(exchange, body)

    async def _load(self, name: str, url: str, target: str) -> None:
        target = target.replace("/", "_") or name
        if not is_model_name(name) or not is_model_name(target):
            raise InvalidRequest("model_name has to be a name of letters, digits, '.', '_' and '-', at most 128")
        if self._taken & {name, target}:
            raise ControlRefused(f"model {name!r}, or another one that is called {target!r}, is loaded already")
        if len(self._loaded) >= MAX_MODELS:
            raise LoadRefused(f"out of memory for more than {MAX_MODELS} models: unload another one first")
        self._taken |= {name, target}
        try:
            folder, store = await asyncio.to_thread(_open_archive, url, target, str(next(self._numbers)))
            await self._control.mount(store, target)
            self._loaded[name] = target, folder, store
        finally:
            if name not in self._loaded:
                self._taken -= {name, target}


def _open_archive(url: str, name: str, number: str) -> tuple[str, LocalStore]:
    """Open an archive as a repository; return its folder, too. Blocks.

    url: path of a model's folder, or of a folder of models of which one runs on all others.
    name: the name by which its model is called. number: the repository's, see `ModelStore.namespace`.
    Raises LoadFailed.
    """
    folder = Path(os.path.realpath(url.replace("\0", "")))
    if len(url) > 255 or MODELS.resolve() not in folder.parents:
        raise LoadFailed(f"url has to be a folder below {MODELS}")
    alone = (folder / CONFIG_FILE).is_file() or any(is_version(each.name) for each in folder.glob("*"))
    store = LocalStore(folder.parent if alone else folder)
    models = [folder.name] if alone else store.models()
    steps = {part for each in models for part in part_names(read_config(store, each, ""))}
    whole, others = ([each for each in models if (each in steps) is part] for part in (False, True))
    if len(whole) != 1:
        raise LoadFailed(f"the archive has to hold one model, or an ensemble and its models: it has {models[:8]}")
    store.namespace, store.renamed = number, {name: whole[0]} | {f"{each}@{number}": each for each in others}
    return str(folder.parent if alone else folder), store
