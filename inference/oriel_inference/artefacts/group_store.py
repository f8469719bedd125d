"""The object store through which servers that share no folder share their artefacts: for `--artefact-store`.

    <prefix>/<fingerprint>/...    the artefact, see `oriel_inference.artefacts.objects`

The store saves work; nothing depends on it. A server fetches what is there, builds what is not, and sends what it has
built. The first server to store the manifest of an artefact wins, if several build it; no object is ever changed or
removed. A server that cannot use the store builds by itself, and the models serve all the while. The
requests run on an event loop in a thread of its own, where bytes are also compared and files written.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from oriel_inference.artefacts.folder import MANIFEST, MAX_FILES, ArtefactDamaged, ArtefactFolder
from oriel_inference.artefacts.objects import Copied, fetch, push, stored_manifest
from oriel_inference.errors import StoreUnavailable
from oriel_inference.stores.loop_thread import LoopThread
from oriel_wire.objects.client import ObjectClient, ObjectWriter, Stored
from oriel_wire.objects.errors import ObjectStoreError

_log = logging.getLogger(__name__)
T = TypeVar("T")

REQUEST_S = 30.0  # for a listing
SEND_S = 600.0
MAX_SENT_FILE_BYTES = 512 << 20  # a file is sent in one piece, which is in memory meanwhile
MAX_OBJECTS = 10 * MAX_FILES  # several servers may have sent files of their own for the same artefact


class GroupStoreFailed(Exception):
    """The store cannot be used now. The text is for the operator."""


class GroupStore:
    """The artefact store of a group of servers. Call all methods but `close` on the serving event loop; none blocks it.

    prefix: beginning of all keys, empty or ending with "/". shown: the store's URL, for logs.
    request_s, send_s: seconds that a listing may take, and sending one artefact.
    """

    def __init__(
        self,
        client: ObjectClient,
        writer: ObjectWriter,
        *,
        prefix: str,
        shown: str,
        request_s: float = REQUEST_S,
        send_s: float = SEND_S,
    ) -> None:
        self._client = client
        self._writer = writer
        self._prefix = prefix
        self._shown = shown
        self._request_s = request_s
        self._send_s = send_s
        self._thread = LoopThread("oriel-artefact-store")
        self._sending = asyncio.Lock()

    async def fetch(self, folder: ArtefactFolder, fingerprint: str, fetch_s: float) -> bool:
        """Bring an artefact into the folder; return False if the store does not have it.

        fetch_s: seconds that it may take.
        Raises GroupStoreFailed, and OSError where the folder cannot be written.
        """
        base = f"{self._prefix}{fingerprint}/"
        listed = await self._ask(lambda: self._client.list(base, limit=MAX_OBJECTS), self._request_s)
        objects = {each.key.removeprefix(base): each for each in listed}
        if MANIFEST not in objects:
            return False
        try:
            await self._ask(lambda: self._fetch(folder, fingerprint, objects), fetch_s)
        except ArtefactDamaged as damaged:
            text = f"the artefact {fingerprint} in {self._shown} cannot be used, remove it there: {damaged}"
            raise GroupStoreFailed(text) from damaged
        _log.info("the artefact %s was fetched from %s", fingerprint[:12], self._shown)
        return True

    async def send(self, folder: ArtefactFolder, fingerprint: str) -> None:
        """Store an artefact of the folder, unless there is one; one at a time.

        Raises GroupStoreFailed, and OSError for the folder.
        """

        def pushed() -> Coroutine[Any, Any, Copied | None]:
            return push(
                folder, self._client, self._writer, self._prefix, fingerprint, max_file_bytes=MAX_SENT_FILE_BYTES
            )

        async with self._sending:
            copied = await self._ask(pushed, self._send_s)
        wrong = "it is not in the folder any more" if copied is None else copied.reason
        if wrong:
            raise GroupStoreFailed(f"an artefact is not sent to {self._shown}: {wrong}")

    def close(self) -> None:
        """End all requests and connections. Blocks."""
        self._thread.close(self._close())

    async def _close(self) -> None:
        await self._client.close()
        await self._writer.close()

    async def _fetch(self, folder: ArtefactFolder, fingerprint: str, objects: dict[str, Stored]) -> None:
        manifest = await stored_manifest(self._client, objects[MANIFEST], fingerprint)
        if manifest.size_bytes > folder.max_bytes:
            raise ArtefactDamaged(f"its {manifest.size_bytes} bytes exceed --artefact-folder-bytes: raise it")
        await fetch(folder, self._client, manifest, objects)

    async def _ask(self, work: Callable[[], Coroutine[Any, Any, T]], limit_s: float) -> T:
        """Do work on the loop of the store. Raises GroupStoreFailed, and what the work raises about the folder."""

        async def bounded() -> T:
            try:
                async with asyncio.timeout(limit_s) as limit:
                    return await work()
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise GroupStoreFailed(f"{self._shown} did not answer within {limit_s:g} s") from error
            except ObjectStoreError as error:
                raise GroupStoreFailed(str(error)) from error

        try:
            return await asyncio.wrap_future(self._thread.submit(bounded()))
        except StoreUnavailable as stopping:
            raise GroupStoreFailed(stopping.reason) from stopping
