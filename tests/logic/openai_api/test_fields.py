"""Every field of the official request types is served, ignored for a reason or refused by name, and on the page."""

import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types import CompletionCreateParams, EmbeddingCreateParams
from openai.types.chat import CompletionCreateParams as ChatCreateParams
from openai.types.responses import ResponseCreateParams

from oriel_logic.openai.schema import (
    IGNORED,
    REFUSED,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ResponseRequest,
    StreamOptions,
)

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "logic-openai.md").read_text()
OFFICIAL = [
    (ChatRequest, ChatCreateParams),
    (CompletionRequest, CompletionCreateParams),
    (EmbeddingRequest, EmbeddingCreateParams),
    (ResponseRequest, ResponseCreateParams),
]
# Fields of releases of the official package that are newer than the one of the tests.
NEWER = {ResponseRequest: ["access_programs", "background_options", "image"], ChatRequest: ["moderation"]}


@pytest.mark.parametrize(("kind", "official"), OFFICIAL)
def test_every_official_field_is_dealt_with_and_is_on_the_page(kind: Any, official: Any) -> None:
    variants = getattr(official, "__args__", (official,))
    fields = {name for each in variants for name in get_type_hints(each)} | set(NEWER.get(kind, ()))
    served = set(kind.__struct_fields__)
    assert len(fields) > 4 and not fields - served - set(IGNORED) - set(REFUSED)
    named = set(re.findall(r"`([a-z_.]+)`", PAGE))
    assert not {name for name in fields | served if name not in named}


def test_what_is_refused_or_ignored_is_on_the_page_with_its_reason() -> None:
    for name, why in (IGNORED | REFUSED).items():
        assert re.search(rf"^\| [^|]*`{name}`[^|]*\|.*{re.escape(why)}", PAGE, re.M), name
    assert all(f"`stream_options.{name}`" in PAGE for name in StreamOptions.__struct_fields__)
