"""Makes a curl line that works when pasted, for a service whose inputs are known. Pure."""

import json
import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

JSON = "application/json"
MEDIA_BY_SUFFIX = {
    ".json": JSON,
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".wav": "audio/wav",
    ".txt": "text/plain",
    ".npy": "application/x-npy",
    ".ndjson": "application/x-ndjson",
}
SUFFIX_BY_MEDIA = {media: suffix for suffix, media in reversed(MEDIA_BY_SUFFIX.items())}
# One white pixel, and eight samples of silence at 8 kHz.
SMALLEST = {
    "image/png": "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg==",
    "audio/wav": "UklGRjQAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YRAAAAAAAAAAAAAAAAAAAAAAAAAA",
}
# Text with a required format.
BY_FORMAT = {
    "date-time": "2026-01-31T12:00:00Z",
    "date": "2026-01-31",
    "time": "12:00:00",
    "duration": "PT1S",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "uuid4": "00000000-0000-4000-8000-000000000000",
    "decimal": "1.5",
    "uri": "http://example.com/",
    "email": "name@example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
}
MAX_DEPTH = 8
# A longer body makes a line too long to paste.
MAX_INLINE = 600


def curl_line(
    url: str, takes: Mapping[str, Any], components: Mapping[str, Any], *, sample: Any = None, file: str = ""
) -> str:
    """Return the line. Without a sample a body is made from the schema; for a picture or a sound a placeholder is
    shown.

    takes: media type -> {"schema": ...}, the service's inputs.
    components: its named schemas.
    sample: a JSON value that the service takes.
    file: path of a sample file for the shell; it takes precedence.
    """
    if file:
        media = MEDIA_BY_SUFFIX.get(PurePath(file).suffix.lower(), "application/octet-stream")
        how = f"-d @{shlex.quote(file)}" if media == JSON else f"--data-binary @{shlex.quote(file)}"
        return f"curl -H 'content-type: {media}' {how} {url}"
    if JSON in takes:
        value = sample if sample is not None else example(takes[JSON].get("schema", {}), components)
        body = json.dumps(value, ensure_ascii=False)
        if len(body) <= MAX_INLINE:
            return f"curl -H 'content-type: {JSON}' -d {shlex.quote(body)} {url}"
    media = next((each for each in takes if each in SUFFIX_BY_MEDIA), "")
    if media == "text/plain" or "*/*" in takes:
        return f"curl -H 'content-type: text/plain' -d 'some text' {url}"
    if media:
        return f"curl -H 'content-type: {media}' --data-binary @YOUR-FILE{SUFFIX_BY_MEDIA[media]} {url}"
    return f"curl -X POST {url}" if not takes else f"curl --data-binary @YOUR-FILE {url}"


def example(schema: Mapping[str, Any], components: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a value that fits a JSON Schema, as far as types, defaults, enumerations and minimum sizes go."""
    if depth > MAX_DEPTH:
        return None
    if "$ref" in schema:
        return example(components.get(schema["$ref"].rpartition("/")[2], {}), components, depth + 1)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return example(schema[key][0], components, depth + 1)
    if schema.get("contentEncoding") == "base64":
        return SMALLEST.get(schema.get("contentMediaType", ""), "AAAA")
    kind = schema.get("type", "string")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object":
        needed = schema.get("required", ())
        fields = schema.get("properties", {})
        return {name: example(fields.get(name, {}), components, depth + 1) for name in needed}
    if kind == "array":
        items = schema.get("prefixItems") or [schema.get("items") or {"type": "number"}] * max(1, least(schema))
        return [example(each, components, depth + 1) for each in items[:64]]
    if kind == "string":
        return BY_FORMAT.get(schema.get("format", ""), "text").ljust(schema.get("minLength", 0), ".")
    if kind in ("number", "integer"):
        return schema.get("minimum", 0 if "exclusiveMinimum" not in schema else schema["exclusiveMinimum"] + 1)
    return kind == "boolean" or None


def least(schema: Mapping[str, Any]) -> int:
    return int(schema.get("minItems", 1))
