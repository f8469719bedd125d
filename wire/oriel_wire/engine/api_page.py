"""The page that shows an OpenAPI document and tries what it describes, and what such documents of ours have in common.

The page is one file without anything from elsewhere: its Content-Security-Policy allows its own script and style, by
their hashes, and connections to its own server. It reads `/openapi.json` there, with a key where one is given to it.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["DOCS", "ERROR", "HTML", "OPENAPI", "PAGE", "SAFE", "SAMPLE", "page", "policy"]

OPENAPI, DOCS = "/openapi.json", "/docs"
HTML = "text/html; charset=utf-8"
PAGE = Path(__file__).with_name("api_page.html")
SAFE = (("cache-control", "no-cache"), ("x-content-type-options", "nosniff"))
# Of a media type: a body that the service takes, base64, where it is not text. The page offers it.
SAMPLE = "x-oriel-sample"
ERROR: dict[str, Any] = {
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


@cache
def page() -> tuple[bytes, Sequence[tuple[str, str]]]:
    """The page and the header fields that go with it, but for its media type, `HTML`."""
    text = PAGE.read_bytes()
    return text, (*SAFE, ("content-security-policy", policy(text)))


def policy(text: bytes) -> str:
    """The Content-Security-Policy of a page: nothing from elsewhere, no script or style but those in it."""

    def hashes(tag: bytes) -> str:
        found = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), text, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(each).digest()).decode()}'" for each in found)

    script, style = hashes(b"script") or "'none'", hashes(b"style") or "'none'"
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src 'self' blob: data:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
