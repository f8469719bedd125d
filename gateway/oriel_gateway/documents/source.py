"""The folder of policy documents, and the URL of a folder in an object store."""

from codecs import BOM_UTF8
from pathlib import Path

from oriel_policies.errors import BadDocument
from oriel_wire.objects.client import Location, location_of
from oriel_wire.objects.errors import BadStoreUrl

MAX_DOCUMENT_BYTES = 16 * 1024 * 1024
MAX_TENANTS_BYTES = 256 * 1024 * 1024
MAX_DOCUMENTS = 256
# The largest file of each suffix, in bytes: documents, lines of tenants, key sets of issuers.
KINDS = {".toml": MAX_DOCUMENT_BYTES, ".ndjson": MAX_TENANTS_BYTES, ".json": MAX_DOCUMENT_BYTES}

Stamp = tuple[tuple[str, int, int, int], ...]


class FolderSource:
    """Every `*.toml`, `*.ndjson` and `*.json` directly in one folder. Its methods wait for the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def stamp(self) -> Stamp:
        """A cheap value that differs when there is something new to read; () if it cannot be determined."""
        stamps = []
        try:
            for path in self._paths():
                stat = path.stat()
                stamps.append((path.name, stat.st_mtime_ns, stat.st_size, stat.st_ino))
        except OSError:
            return ()  # a file or the folder was removed meanwhile: the next call finds out
        return tuple(stamps)

    def read(self) -> dict[str, bytes]:
        """File name -> content. Raises BadDocument when they cannot be read."""
        documents, unreadable = self.readable()
        if unreadable:
            unreadable[0].others = tuple(unreadable[1:])
            raise unreadable[0]
        return documents

    def readable(self) -> tuple[dict[str, bytes], list[BadDocument]]:
        """The contents of the readable files, and an error for each unreadable one.

        Raises BadDocument if the folder cannot be read.
        """
        try:
            paths = self._paths()
        except OSError as error:
            raise BadDocument(str(self._folder), "", f"the folder cannot be read: {error.strerror}") from error
        if not any(path.suffix == ".toml" for path in paths):
            raise BadDocument(str(self._folder), "", "the folder holds no .toml document")
        if len(paths) > MAX_DOCUMENTS:
            raise BadDocument(str(self._folder), "", f"more than {MAX_DOCUMENTS} documents")
        documents: dict[str, bytes] = {}
        unreadable: list[BadDocument] = []
        for path in paths:
            bound = KINDS[path.suffix]
            try:
                with path.open("rb") as file:
                    data = file.read(bound + 1)
            except OSError as error:
                unreadable.append(BadDocument(path.name, "", f"cannot be read: {error.strerror}"))
                continue
            if len(data) > bound:
                unreadable.append(BadDocument(path.name, "", f"larger than {bound} bytes"))
                continue
            documents[path.name] = data.removeprefix(BOM_UTF8)  # some editors write one
        return documents, unreadable

    def _paths(self) -> list[Path]:
        return sorted(
            path
            for path in self._folder.iterdir()
            if path.suffix in KINDS and not path.name.startswith(".") and path.is_file()
        )


def store_location(url: str) -> Location:
    """Parse `s3://bucket/prefix`, `gs://bucket/prefix` or `az://account/container/prefix`.

    Raises BadStoreUrl, also for the address of a store in the URL: the environment names it.
    """
    location = location_of(url)
    if location.endpoint:
        raise BadStoreUrl(f"{url[:100]!r} is not s3://bucket/prefix: set AWS_ENDPOINT_URL to the address of the store")
    return location
