"""The files of one version: small versions are copied to a folder that nobody else writes, so that the opened files are
the checked ones; the checksums of a configuration; and the reference with which its samples are compared
(docs/prediction-quality.md).
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import file_digest, md5
from pathlib import Path
from tempfile import TemporaryDirectory

from oriel_inference.errors import ConfigInvalid, LoadFailed
from oriel_inference.model import is_version
from oriel_inference.stores import ModelStore
from oriel_policies.quality.reference import REFERENCE_FILE, Reference, parse_reference
from oriel_wire.v2.proto import model_config_pb2 as pb

_log = logging.getLogger(__name__)

_MAX_SHOWN = 100


def check_sums(config: pb.ModelConfig, store: ModelStore, model: str, file: str) -> None:
    """Compare the files that the agent `checksum` of a configuration names with their sums. Raises LoadFailed with
    Triton's sentences.
    """
    for index, agent in enumerate(config.model_repository_agents.agents):
        for key, expected in agent.parameters.items() if agent.name == "checksum" else ():
            algorithm, colon, name = key.partition(":")
            shown = name[:_MAX_SHOWN]
            if not colon:
                reason = f"failed to parse key: {key[:_MAX_SHOWN]}"
            elif algorithm.lower() != "md5":
                reason = f"Unsupported checksum algorithm: {algorithm[:_MAX_SHOWN]}"
            elif (found := _md5(store, model, name)) != expected:
                reason = f"Mismatched MD5 hash for file {shown}, expect: {expected[:_MAX_SHOWN]}, got: {found}"
            else:
                continue
            raise ConfigInvalid(file, f"model_repository_agents.agents[{index}]", reason)


def _md5(store: ModelStore, model: str, name: str) -> str:
    version, slash, inside = name.partition("/")
    if not slash or not is_version(version):
        return md5(store.data(model, name), usedforsecurity=False).hexdigest()
    with store.artifact(model, int(version), inside).open("rb") as opened:
        return file_digest(opened, partial(md5, usedforsecurity=False)).hexdigest()


@contextmanager
def private_files(
    store: ModelStore, model: str, version: int, paths: Mapping[str, Path]
) -> Iterator[Mapping[str, Path]]:
    """Give the files of `paths` in a private copy of their version; the originals if it is too large or cannot be
    written.

    When the block ends and the copy is deleted, a runtime has read or mapped what it needs. Raises LoadFailed for files
    that must not be opened.
    """
    with ExitStack() as stack:
        try:
            made = TemporaryDirectory(prefix="oriel-model-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(made))
            copied = store.copy(model, version, folder)
        except OSError as error:
            _log.debug("model %s is read from the repository itself, which may change meanwhile: %s", model, error)
            copied = False
        yield {name: _same(folder / name, path) for name, path in paths.items()} if copied else paths


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
