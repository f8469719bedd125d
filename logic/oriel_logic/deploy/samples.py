"""Finds the sample that a new version of a service has to answer before it takes requests.

The first of these counts: `sample = "..."` of [tool.oriel], a file of the handler's folders; `@service(sample=...)`; a
file beside the handler, `sample.<kind>` in a service's own folder or `<service>.sample.<kind>` anywhere.
"""

import mimetypes
from dataclasses import dataclass, replace
from pathlib import Path

from oriel_logic.loading.folder_config import BadConfig
from oriel_logic.loading.listing import Source
from oriel_logic.services.definition import SHOWN_BYTES, Definition

KINDS = {".npy": "application/x-npy", ".ndjson": "application/x-ndjson", ".jsonl": "application/x-ndjson"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A request body. label: names the sample in messages."""

    body: bytes
    content_type: str
    label: str


def find_sample(source: Source, definition: Definition, *, limit_bytes: int) -> Sample | None:
    """Return the sample, or None.

    Raises BadConfig for a named file that does not exist, and for one that is not a regular file or too large.
    """
    if definition.options.shown is not None and not source.config.sample:
        kind, body = definition.options.shown
        return Sample(body=body, content_type=kind, label="the sample of @service")
    path = sample_file(source, definition.name)
    return read_sample(path, limit_bytes) if path is not None else None


def sample_file(source: Source, name: str) -> Path | None:
    """Return the file that is the sample of service `name`, or None. Raises BadConfig."""
    named = source.config.sample
    if named:
        for home in source.homes:
            if (home / named).is_file():
                return home / named
        raise BadConfig(f"sample = {named!r} is not a file of its folder")
    stems = [f"{name}.sample"] if source.file.is_plain else [f"{name}.sample", "sample"]
    for folder in source.homes:
        for path in [path for stem in stems for path in sorted(folder.glob(f"{stem}.*")) if path.stem == stem]:
            if not path.is_file():  # opening a pipe would wait for its writer
                raise BadConfig(f"{path.name} is not a regular file: a sample has to be one")
            return path
    return None


def with_shown_sample(source: Source, definition: Definition) -> Definition:
    """Add the sample for descriptions to a definition; leave it unchanged if the sample is too large or unreadable."""
    try:
        sample = find_sample(source, definition, limit_bytes=SHOWN_BYTES)
    except (BadConfig, OSError):
        return definition
    return definition if sample is None else replace(definition, shown=(sample.content_type, sample.body))


def read_sample(path: Path, limit_bytes: int) -> Sample:
    with path.open("rb") as file:
        body = file.read(limit_bytes + 1)
    if len(body) > limit_bytes:
        raise BadConfig(f"{path.name} is larger than the {limit_bytes} bytes that a request may have")
    kind = KINDS.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return Sample(body=body, content_type=kind, label=path.name)
