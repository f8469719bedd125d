"""The `PolicySource` seam and the folder source."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from oriel_policies.errors import BadDocument

__all__ = ["FolderSource", "PolicySource"]

MAX_DOCUMENT_BYTES = 16 * 1024 * 1024
MAX_DOCUMENTS = 256


class PolicySource(Protocol):
    """Where policy documents come from."""

    def read(self) -> Mapping[str, bytes]:
        """File name -> content. Raises BadDocument when they cannot be read."""


class FolderSource:
    """Every `*.toml` directly in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self) -> Mapping[str, bytes]:
        try:
            paths = sorted(path for path in self._folder.iterdir() if path.suffix == ".toml" and path.is_file())
        except OSError as error:
            raise BadDocument(str(self._folder), "", f"the folder cannot be read: {error.strerror}") from error
        if not paths:
            raise BadDocument(str(self._folder), "", "the folder holds no .toml document")
        if len(paths) > MAX_DOCUMENTS:
            raise BadDocument(str(self._folder), "", f"more than {MAX_DOCUMENTS} documents")
        documents: dict[str, bytes] = {}
        for path in paths:
            try:
                with path.open("rb") as file:
                    documents[path.name] = file.read(MAX_DOCUMENT_BYTES + 1)
            except OSError as error:
                raise BadDocument(path.name, "", f"cannot be read: {error.strerror}") from error
            if len(documents[path.name]) > MAX_DOCUMENT_BYTES:
                raise BadDocument(path.name, "", f"larger than {MAX_DOCUMENT_BYTES} bytes")
        return documents
