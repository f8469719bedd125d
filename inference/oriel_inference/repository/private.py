"""Makes sure that the opened files are the checked ones: small versions are first copied to a folder that nobody else
writes.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from oriel_inference.stores import ModelStore

_log = logging.getLogger(__name__)


@contextmanager
def private_files(
    store: ModelStore, model: str, version: int, paths: Mapping[str, Path]
) -> Iterator[Mapping[str, Path]]:
    """Give the files of `paths` in a private copy of their version; the originals if it is too large or cannot be
    written.

    When the block ends and the copy is deleted, a runtime has read or mapped what it needs. Raises LoadFailed for files
    that must not be opened.
    """
    try:
        folder = Path(mkdtemp(prefix="oriel-model-"))
    except OSError as error:
        _log.debug("model %s is read from the repository itself, which may change meanwhile: %s", model, error)
        yield paths
        return
    try:
        try:
            copied = store.copy(model, version, folder)
        except OSError as error:
            _log.debug("model %s is read from the repository itself, which may change meanwhile: %s", model, error)
            copied = False
        yield {name: _same(folder / name, path) for name, path in paths.items()} if copied else paths
    finally:
        rmtree(folder, ignore_errors=True)


def _same(copied: Path, original: Path) -> Path:
    """Return the copy of a model file; if the model is a folder of files, the copy of the file inside."""
    return copied / original.name if copied.is_dir() else copied
