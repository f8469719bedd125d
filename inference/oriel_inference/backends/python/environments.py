"""The Python environments that models bring along (`EXECUTION_ENV_PATH`): a folder, or an archive of `conda-pack`."""

import os
import shutil
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from threading import Lock

from oriel_inference.backends import without_folders
from oriel_inference.errors import LoadFailed
from oriel_wire.v2.proto import model_config_pb2 as pb

KEY = "EXECUTION_ENV_PATH"
MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"
MAX_BYTES = 32 << 30
MAX_MEMBERS = 1_000_000
MAX_SECONDS = 600.0
MAX_ARCHIVES = 32
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


class Environments:
    """Finds the interpreters of models. An archive is extracted once, into a folder that `close` deletes."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._folder: str | None = None
        self._extracted: dict[tuple[str, int, int], Path] = {}

    def close(self) -> None:
        """Delete what was extracted; blocks."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def interpreter(self, config: pb.ModelConfig, folder: Path) -> str:
        """Return the interpreter for a model, "" for the server's; blocks. Raises LoadFailed.

        folder: the model's folder.
        """
        if KEY not in config.parameters:
            return ""
        path = Path(config.parameters[KEY].string_value.replace(MODEL_FOLDER, str(folder)))
        if not path.is_absolute():
            raise LoadFailed(f"parameters[{KEY!r}]: the path must be absolute, or begin with {MODEL_FOLDER}")
        try:
            root = self._extract(path) if path.is_file() else path
        except LoadFailed:
            raise
        except Exception as error:
            # Those of archives and their compressions have no common base class below Exception.
            raise LoadFailed(f"{KEY} {path.name}: it cannot be extracted: {without_folders(str(error))}") from error
        python = root / "bin/python"
        if not os.access(python, os.X_OK) or not (root / f"lib/python{_VERSION}").is_dir():
            reason = f"it must hold bin/python and lib/python{_VERSION}, the version of the server's own Python"
            raise LoadFailed(f"{KEY} {path.name}: {reason}")
        return str(python)

    def _extract(self, archive: Path) -> Path:
        status = archive.stat()
        key = (str(archive), status.st_mtime_ns, status.st_size)
        with self._lock:
            if key not in self._extracted:
                if len(self._extracted) >= MAX_ARCHIVES:
                    raise LoadFailed(f"{KEY}: {MAX_ARCHIVES} archives are extracted already, restart the server")
                self._folder = self._folder or tempfile.mkdtemp(prefix="oriel-python-")
                into = Path(tempfile.mkdtemp(dir=self._folder))
                try:
                    _extract(archive, into)
                except BaseException:
                    shutil.rmtree(into, ignore_errors=True)
                    raise
                self._extracted[key] = into
            return self._extracted[key]


def _extract(archive: Path, into: Path) -> None:
    ends, size = time.monotonic() + MAX_SECONDS, 0
    with tarfile.open(archive) as opened:
        for number, member in enumerate(opened):
            size += member.size
            if size > MAX_BYTES or number >= MAX_MEMBERS or time.monotonic() > ends:
                bounds = f"{MAX_BYTES >> 30} GiB, {MAX_MEMBERS} members or {MAX_SECONDS:g} s"
                raise LoadFailed(f"{KEY} {archive.name}: extracting it takes more than {bounds}")
            opened.extract(member, into, filter="data")  # refuses what would lie outside, and devices
        # The checksum is at the very end.
        while opened.fileobj is not None and opened.fileobj.read(1 << 20) and time.monotonic() < ends:
            pass
