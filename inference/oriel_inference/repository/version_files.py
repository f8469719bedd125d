"""The files of one version: small versions are copied to a folder that nobody else writes, so that the opened files are
the checked ones; and the reference with which its samples are compared (docs/prediction-quality.md).
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from oriel_inference.errors import LoadFailed
from oriel_inference.stores import ModelStore
from oriel_policies.quality.reference import REFERENCE_FILE, Reference, parse_reference

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


def read_reference(store: ModelStore, model: str, version: int) -> Reference | None:
    """Return the reference of a version; None if it has none. One that cannot be read is reported, and the version
    serves without it.
    """
    name = f"{version}/{REFERENCE_FILE}"
    try:
        text = store.text(model, name)
        return None if text is None else parse_reference(text)
    except (LoadFailed, ValueError) as error:
        reason = error.reason if isinstance(error, LoadFailed) else str(error)
        _log.warning("%s/%s is not used: %s", model, name, reason)
        return None
