"""Names of files inside a model's folder."""

from codecs import BOM_UTF8
from collections.abc import Sequence

from oriel_inference.errors import LoadFailed


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
