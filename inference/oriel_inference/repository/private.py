"""What was checked is what is opened: small versions are copied to where nobody else writes before either happens."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from oriel_inference.stores import ModelStore

__all__ = ["private_files"]

_log = logging.getLogger(__name__)


@contextmanager
def private_files(
    store: ModelStore, model: str, version: int, paths: Mapping[str, Path]
) -> Iterator[Mapping[str, Path]]:
    """The files of `paths` in a private copy of their version; as they lie if it is too large or cannot be written.

    A runtime has read or mapped what it needs when the block ends and the copy goes. Raises LoadFailed for files that
    are not to be touched.
    """
    try:
        folder = Path(mkdtemp(prefix="oriel-model-"))
    except OSError as error:
        _log.debug("no private copy of model %s: %s", model, error)
        yield paths
        return
    try:
        try:
            copied = store.copy(model, version, folder)
        except OSError as error:
            _log.debug("no private copy of model %s: %s", model, error)
            copied = False
        yield {name: _same(folder / name, path) for name, path in paths.items()} if copied else paths
    finally:
        rmtree(folder, ignore_errors=True)


def _same(copied: Path, original: Path) -> Path:
    """The copy of a model file; of the one inside, where the model is a folder of files."""
    return copied / original.name if copied.is_dir() else copied
