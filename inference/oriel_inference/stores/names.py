"""Names of files inside a model's folder."""

from collections.abc import Sequence

from oriel_inference.errors import LoadFailed

__all__ = ["relative_parts"]


def relative_parts(filename: str) -> Sequence[str]:
    """The parts of a relative file name; anything that could climb is refused before it touches the disk."""
    parts = filename.split("/")
    if not filename or "\0" in filename or any(part in ("", ".", "..") for part in parts):
        raise LoadFailed(f"file name {filename[:64]!r} must be relative and stay inside the model's folder")
    return parts
