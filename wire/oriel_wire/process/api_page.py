"""The page that displays an OpenAPI document and sends requests to its operations, and the parts all our documents
share.

The page is one file that loads nothing from other servers: its Content-Security-Policy allows its own script and
style, by their hashes, and connections to its own server. It reads `/openapi.json` there, with a key if the user
enters one.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

OPENAPI, DOCS = "/openapi.json", "/docs"
HTML = "text/html; charset=utf-8"
PAGE = Path(__file__).with_name("api_page.html")
SAFE = (("cache-control", "no-cache"), ("x-content-type-options", "nosniff"))
# Key in a media type: an example body that the service takes, in base64 unless it is text. The page offers it.
SAMPLE = "x-oriel-sample"
# The models that an operation of the OpenAI API accepts.
MODELS = "x-oriel-models"
# Paths of the OpenAI API: the service's name at the gateway, the answer, and an example body without its model.
OPENAI: dict[str, tuple[str, str, dict[str, Any]]] = {
    "/v1/embeddings": ("embeddings", "Embeddings, as the OpenAI API has them", {"input": "text"}),
    "/v1/completions": ("completions", "A completion, as the OpenAI API has it", {"prompt": "text", "max_tokens": 16}),
    "/v1/chat/completions": (
        "chat.completions",
        "An answer in a chat, as the OpenAI API has it",
        {"messages": [{"role": "user", "content": "text"}], "max_tokens": 16},
    ),
    "/v1/responses": ("responses", "A response, as the OpenAI API has it", {"input": "text", "max_output_tokens": 16}),
}
BINARY: dict[str, Any] = {"type": "string", "format": "binary"}  # the schema of a body that is only bytes
ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code", "reason", "request_id"],
            "properties": {
                "message": {"type": "string", "description": "a sentence for people"},
                "type": {"type": "string", "description": "as the OpenAI API has it, like its `code` and `param`"},
                "param": {"type": ["string", "null"], "description": "the parameter at fault"},
                "code": {"type": "string"},
                "reason": {"type": "string", "description": "for programs: one of docs/errors.md"},
                "request_id": {"type": "string"},
                "field": {"type": "string", "description": "path of the field at fault, like $.items[2].price"},
                "stage": {"type": "string", "description": "what ran out of time"},
            },
        }
    },
}


def openai_operation(path: str, models: Sequence[str]) -> dict[str, Any]:
    """The operation at one of the paths `OPENAI`. models: the allowed names; the first one is in the example."""
    name, summary, body = OPENAI[path]
    model: dict[str, Any] = {"type": "string", "enum": list(models)} if models else {"type": "string"}
    schema = {
        "type": "object",
        "required": ["model", next(iter(body))],
        "properties": {"model": model, **{name: {} for name in body}},
    }
    example = {"model": models[0] if models else "MODEL", **body}
    return {
        "tags": ["OpenAI"],
        "operationId": f"openai-{name.replace('.', '-')}",
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": example}}},
        "responses": {"200": {"description": "the answer", "content": {"application/json": {"schema": {}}}}},
    }


@cache
def page() -> tuple[bytes, Sequence[tuple[str, str]]]:
    """The page and its header fields except the media type, which is `HTML`."""
    text = PAGE.read_bytes()
    return text, (*SAFE, ("content-security-policy", policy(text)))


def policy(text: bytes) -> str:
    """The Content-Security-Policy of a page: nothing from other servers, and only the scripts and styles in the
    page.
    """

    def hashes(tag: bytes) -> str:
        found = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), text, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(each).digest()).decode()}'" for each in found)

    script, style = hashes(b"script") or "'none'", hashes(b"style") or "'none'"
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src 'self' blob: data:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
