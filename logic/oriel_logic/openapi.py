"""What this server serves, as an OpenAPI 3.1 document and as a page to try it on.

The page is one file without anything from elsewhere: its Content-Security-Policy allows its own script and style, by
their hashes, and connections to this server. It reads the document.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from oriel_logic.definition import Definition
from oriel_logic.replies import Reply

__all__ = ["DOCS", "OPENAPI", "Description", "document"]

OPENAPI, DOCS = "/openapi.json", "/docs"
PAGE = Path(__file__).with_name("docs.html")
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "reason", "request_id"],
            "properties": {
                "message": {"type": "string", "description": "a sentence for people"},
                "reason": {"type": "string", "description": "for programs: one of docs/errors.md"},
                "request_id": {"type": "string"},
                "field": {"type": "string", "description": "path of the field at fault, like $.items[2].price"},
                "stage": {"type": "string", "description": "what ran out of time"},
            },
        }
    },
}
REFUSALS = {
    "406": "none of the media types in Accept is given",
    "413": "the body is larger than what is read",
    "415": "a body of this media type is not read",
    "422": "the input cannot be served as it is",
    "503": "no room, or the service cannot run: Retry-After says when to come back",
    "504": "the time ran out",
}


class Description:
    """The two routes. definitions: those that can be called now."""

    def __init__(self, definitions: Callable[[], Iterable[Definition]]) -> None:
        self._definitions = definitions
        self._page: Reply | None = None

    async def openapi(self, inbound: object, visit: object) -> Reply:
        """`GET /openapi.json`. Made afresh: services come and go."""
        return Reply(status=200, body=msgspec.json.encode(document(self._definitions())), headers=SAFE)

    async def docs(self, inbound: object, visit: object) -> Reply:
        """`GET /docs`."""
        if self._page is None:
            text = PAGE.read_bytes()
            headers = (*SAFE, ("content-security-policy", policy(text)))
            self._page = Reply(status=200, body=text, content_type="text/html; charset=utf-8", headers=headers)
        return self._page


SAFE = (("cache-control", "no-cache"), ("x-content-type-options", "nosniff"))


def policy(page: bytes) -> str:
    """The Content-Security-Policy of a page: nothing from elsewhere, no script or style but those in it."""

    def hashes(tag: bytes) -> str:
        found = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(each).digest()).decode()}'" for each in found)

    return (
        f"default-src 'none'; script-src {hashes(b'script')}; style-src {hashes(b'style')}; connect-src 'self'; "
        "img-src 'self' blob: data:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def document(definitions: Iterable[Definition]) -> dict[str, Any]:
    """An OpenAPI 3.1 document. JSON Schema 2020-12, which it is based on, is what the definitions have."""
    found = sorted(definitions, key=lambda each: each.name)
    schemas: dict[str, Any] = {"Error": ERROR}
    for definition in found:
        schemas |= definition.schemas.components
    return {
        "openapi": "3.1.0",
        "info": {"title": "Oriel services", "version": "1"},
        "paths": {f"/v1/services/{each.name}": {"post": operation(each)} for each in found},
        "components": {
            "schemas": schemas,
            "responses": {
                status: {
                    "description": why,
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                }
                for status, why in REFUSALS.items()
            },
        },
    }


def operation(definition: Definition) -> dict[str, Any]:
    schemas = definition.schemas
    made: dict[str, Any] = {
        "operationId": re.sub(r"[^A-Za-z0-9_]", "_", definition.name),
        "summary": definition.description or definition.name,
        "responses": {
            "200": {"description": gives(definition), "content": content(schemas.output)},
            **{status: {"$ref": f"#/components/responses/{status}"} for status in REFUSALS},
        },
    }
    if schemas.query:
        made["parameters"] = [
            {**each, "description": "beside a body that is not JSON and no form"} for each in schemas.query
        ]
    if schemas.input:
        made["requestBody"] = {"required": "*/*" not in schemas.input, "content": with_sample(definition)}
    return made


def gives(definition: Definition) -> str:
    if definition.is_streamed:
        return "a stream: one value per line or event, the schema is of one; after an error the last one is an Error"
    return "the answer, of the type that the service declares; tests check that, the server does not"


def content(found: Mapping[str, Any]) -> dict[str, Any]:
    return {media: dict(each) for media, each in found.items()}


def with_sample(definition: Definition) -> dict[str, Any]:
    made = content(definition.schemas.input)
    options = definition.options
    if options.sample is not None and not isinstance(options.sample, bytes):
        if options.sample_type in made or "*/*" in made:
            made.setdefault(options.sample_type, {})["example"] = options.sample
    return made
