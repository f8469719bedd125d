"""Describes this server's services as an OpenAPI 3.1 document, and as a page that shows the document."""

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import msgspec

from oriel_logic.server.replies import Reply
from oriel_logic.services.definition import SHOWN_BYTES, Definition
from oriel_wire.process.api_page import BINARY, ERROR, HTML, MODELS, SAFE, SAMPLE, openai_operation, page

REFUSALS = {
    "406": "none of the media types in Accept is given",
    "413": "the body is larger than what is read",
    "415": "a body of this media type is not read",
    "422": "the input cannot be served as it is",
    "503": "no room, or the service cannot run: Retry-After says when to come back",
    "504": "the time ran out",
}


class Description:
    """The two routes. definitions: the services that can be called now; openai: models by path of the OpenAI API."""

    def __init__(
        self, definitions: Callable[[], Iterable[Definition]], openai: Callable[[], Mapping[str, Sequence[str]]]
    ) -> None:
        self._definitions = definitions
        self._openai = openai

    async def openapi(self, inbound: object, visit: object) -> Reply:
        """Answer `GET /openapi.json`. The document is made for each request, because services change."""
        made = document(self._definitions(), self._openai())
        return Reply(status=200, body=msgspec.json.encode(made), headers=SAFE)

    async def docs(self, inbound: object, visit: object) -> Reply:
        """Answer `GET /docs`."""
        text, headers = page()
        return Reply(status=200, body=text, content_type=HTML, headers=tuple(headers))


def document(
    definitions: Iterable[Definition], openai: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> dict[str, Any]:
    """Make an OpenAPI 3.1 document, which includes JSON Schema 2020-12 as the definitions have it."""
    found = sorted(definitions, key=lambda each: each.name)
    schemas: dict[str, Any] = {"Error": ERROR}
    for definition in found:
        schemas |= definition.schemas.components
    return {
        "openapi": "3.1.0",
        "info": {"title": "Oriel services", "version": "1"},
        "paths": {
            **{f"/v1/services/{each.name}": {"post": operation(each)} for each in found},
            **{path: {"post": openai_operation(path, names) | {MODELS: list(names)}} for path, names in openai.items()},
        },
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
    return "the answer, of the type that the service declares; the server does not check the type, tests do"


def content(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the media types with a schema for each: where the service declares none, a body of them is only bytes."""
    return {media: dict(each) if each or media == "*/*" else {"schema": BINARY} for media, each in found.items()}


def with_sample(definition: Definition) -> dict[str, Any]:
    """Return the accepted media types with the service's sample: an example if it is JSON, else `SAMPLE`."""
    made = content(definition.schemas.input)
    media, body = definition.shown or ("", b"")
    if not body or len(body) > SHOWN_BYTES or not (media in made or "*/*" in made):
        return made
    if media == "application/json":
        with suppress(msgspec.MsgspecError):
            made.setdefault(media, {})["example"] = msgspec.json.decode(body)
    else:
        made.setdefault(media, {})[SAMPLE] = b64encode(body).decode()
    return made
