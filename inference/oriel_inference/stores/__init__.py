"""Sources of model files: the `ModelStore` protocol and its implementations.

Layout of every store: `<model>/config.pbtxt` (optional), `<model>/<version>/<file>`, and other files beside the
configuration (labels).
"""

from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from oriel_inference.errors import LoadFailed

__all__ = ["FOLDER_ENTRIES", "Fingerprint", "ModelStore", "decoded", "relative_parts"]

# The file that stands for a model which is a folder.
FOLDER_ENTRIES = ("model.onnx", "saved_model.pb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Fingerprint of a model's files: equal as long as nothing has changed.

    shared: fingerprint of everything beside the version folders.
    versions: version -> fingerprint of its files.
    """

    shared: str
    versions: Mapping[int, str] = field(default_factory=dict)


class ModelStore(Protocol):
    """A read-only view of one model repository. Methods block: call them from a thread.

    Each raises LoadFailed with a reason that contains no absolute path.
    shown: the repository's name in messages; it contains no absolute path either.
    runs_code: True if its Python models may run.
    fetches: True if `artifact` may have to fetch over the network.
    namespace: the repository's number, with which its models are told from those of other repositories; "" if every
    name may occur once only. Writer: `opening`.
    renamed: the name by which a model is served -> its folder, if its configuration may say another name. Models that
    are not in it are not served, unless it is empty.
    """

    namespace: str
    renamed: Mapping[str, str]

    @property
    def shown(self) -> str: ...

    @property
    def fetches(self) -> bool: ...

    @property
    def runs_code(self) -> bool: ...

    @property
    def up(self) -> bool:
        """Return whether the last scan of the repository succeeded."""
        ...

    def models(self) -> Sequence[str]:
        """Return the names of the models, sorted; entries with invalid names are left out."""
        ...

    def versions(self, model: str) -> Sequence[int]:
        """Return the versions of `model`, ascending."""
        ...

    def files(self, model: str, version: int) -> Sequence[str]:
        """Return the names in the folder of `version`, sorted; empty if it cannot be listed."""
        ...

    def size_bytes(self, model: str, version: int) -> int:
        """Return the size of all files of `version`, without fetching them."""
        ...

    def text(self, model: str, filename: str) -> str | None:
        """Return a small text file of `model` (its configuration, its labels); None if it is missing."""
        ...

    def artifact(self, model: str, version: int, filename: str) -> Path:
        """Return the local path of a version's file, which lies beside all other files of that version."""
        ...

    def copy(self, model: str, version: int, into: Path) -> bool:
        """Copy all files of a version below the folder `into`, so that nobody else can change what is then opened.

        Returns False, with nothing copied, if they are too large for that.
        """
        ...

    def data(self, model: str, filename: str) -> bytes:
        """Return a file of `model` that is not a model (the inputs of its warm-up)."""
        ...

    def retries(self, model: str) -> bool:
        """Return whether a file could not be read for a temporary reason: a later scan then shows it as changed."""
        ...

    def loaded(self, model: str) -> None:
        """Report that a load has ended: of the paths that were returned, only those of serving versions are needed."""
        ...

    def fingerprint(self, model: str) -> Fingerprint:
        """Return the fingerprint of all files of `model` without opening any; never raises because of the folder's
        content.
        """
        ...


def relative_parts(filename: str) -> Sequence[str]:
    """Return the parts of a relative file name. A name that could lead outside, or that a runtime could take for more
    than a name, is refused before any file is opened.
    """
    parts = filename.split("/")
    if "*" in filename:
        raise LoadFailed(f"file name {filename[:64]!r} must have no asterisk")
    if not filename or "\0" in filename or any(part in ("", ".", "..") for part in parts):
        raise LoadFailed(f"file name {filename[:64]!r} must be relative and stay inside the model's folder")
    return parts


def decoded(data: bytes, shown: str) -> str:
    """Return the text of a small file; comments behind a `#` may have any encoding. Raises LoadFailed."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    try:
        lines = [line.partition(b"#") for line in data.removeprefix(BOM_UTF8).split(b"\n")]
        return "\n".join(f"{text.decode()}{mark.decode()}{rest.decode(errors='replace')}" for text, mark, rest in lines)
    except UnicodeDecodeError as error:
        raise LoadFailed(f"{shown} is not UTF-8 text") from error
