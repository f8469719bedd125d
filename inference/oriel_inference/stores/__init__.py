"""Where model files come from: the `ModelStore` seam and its implementations.

Layout of every store: `<model>/config.pbtxt` (optional), `<model>/<version>/<file>`, other files beside the
configuration (labels).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

__all__ = ["Fingerprint", "ModelStore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a model's files look like from outside: equal while nothing was changed.

    shared: everything beside the version folders. versions: version -> its files.
    """

    shared: str
    versions: Mapping[int, str] = field(default_factory=dict)


class ModelStore(Protocol):
    """Read-only view of one model repository. Methods block: call them from a thread.

    Each raises LoadFailed with a reason that holds no absolute path. shown: for people; also no absolute path.
    runs_code: whether its Python models may run. fetches: whether `artifact` may take as long as a network does.
    """

    @property
    def shown(self) -> str: ...

    @property
    def fetches(self) -> bool: ...

    @property
    def runs_code(self) -> bool: ...

    @property
    def up(self) -> bool:
        """Whether the last look at what it holds succeeded."""
        ...

    def models(self) -> Sequence[str]:
        """Names of the models, sorted; entries whose names no model may have are left out."""
        ...

    def versions(self, model: str) -> Sequence[int]:
        """Versions of `model`, ascending."""
        ...

    def files(self, model: str, version: int) -> Sequence[str]:
        """Names in the folder of `version`, sorted; empty if it cannot be listed."""
        ...

    def text(self, model: str, filename: str) -> str | None:
        """A small text file of `model` (its configuration, its labels); None if there is none."""
        ...

    def artifact(self, model: str, version: int, filename: str) -> Path:
        """A local path of a version's file, which lies beside everything else of that version."""
        ...

    def copy(self, model: str, version: int, into: Path) -> bool:
        """Copy all files of a version below the folder `into`, so that nobody else can change what is then opened.

        False, with nothing copied, if they are too large for that.
        """
        ...

    def data(self, model: str, filename: str) -> bytes:
        """A file of `model` that is not a model (the inputs of its warm-up)."""
        ...

    def retries(self, model: str) -> bool:
        """Whether something of it could not be read for a reason that may pass: a later look shows it as changed."""
        ...

    def loaded(self, model: str) -> None:
        """A load of it has ended: paths that were handed out are needed only as far as they serve."""
        ...

    def fingerprint(self, model: str) -> Fingerprint:
        """Of all files of `model`, without opening any; never raises because of what lies in the folder."""
        ...
