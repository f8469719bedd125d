"""docs/routing.md: its examples form one valid set with the effects it describes, and its bounds are those of the
code.
"""

import argparse
import re
from pathlib import Path

import pytest

from oriel_gateway.command import add_arguments
from oriel_gateway.routing.targets import Target, resolve
from oriel_gateway.shared import single_flight, state
from oriel_policies.documents import Snapshot, compile_documents
from oriel_policies.errors import BadDocument
from oriel_policies.promise.routing import RouteTable

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "routing.md").read_text()


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    blocks = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return compile_documents({"routing.toml": "\n".join(blocks).encode()})


def target(snapshot: Snapshot, path: str, **headers: str) -> Target:
    found = resolve("POST", path, "", snapshot.tenants["acme"], RouteTable(snapshot.routes))
    if found.choices is None:
        return found
    chosen = found.choices.pick({name.replace("_", "-"): value for name, value in headers.items()}.get, "id")
    assert chosen is not None
    return chosen


def test_the_examples_do_what_the_page_says(snapshot: Snapshot) -> None:
    infer = "/v2/models/digits/infer"
    assert target(snapshot, infer, x_stage="preview").plan.name == "preview"
    assert target(snapshot, "/v2/models/digits/versions/7/infer").plan.name == "pinned"
    canary = target(snapshot, infer)
    assert canary.plan.name == "digits" and canary.side in ("stable", "canary@8") and canary.special
    embed = target(snapshot, "/v2/models/embed/infer")
    assert embed.plan.shadow_pool == "canary" and embed.special and not embed.keepable
    labels = target(snapshot, "/v1/services/labels")
    assert labels.keepable and labels.plan.cache_s == 30.0 and not labels.plan.cache_shared
    assert target(snapshot, "/v2/models/chat-a/infer").plan.sticky == "x-session"
    further = target(snapshot, "/v2/models/large-7b/infer").fallbacks
    assert [(each.pool, each.name) for each in further] == [("canary", "large-7b"), ("small", "tiny")]


def test_its_bounds_are_those_of_the_code() -> None:
    for text, value in (("64 MiB for all", state.CACHE_BYTES >> 20), ("64 are on", state.SHADOWS)):
        assert text in PAGE and text.startswith(str(value))
    assert state.REPLAY_BYTES == 64 * 1024 and "over 64 KiB" in PAGE
    assert state.KEPT_BYTES == 1024 * 1024 and "at most 1 MiB" in PAGE
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args(["--policies", "x"]).cache_bytes == state.CACHE_BYTES
    assert all(f"`{name}`" in PAGE for name in (*single_flight.VARYING, *single_flight.ABOUT_THE_CLIENT))


@pytest.mark.parametrize(
    "line",
    [
        'headers = { authorization = "Bearer x" }',
        'headers = { X-Api-Key = "x" }',
        'sticky = "header:authorization"',
        'split_by = "header:x-api-key"',
        'name = "a\\r\\nb"',
    ],
)
def test_a_credential_is_no_condition_and_a_name_is_a_name(line: str) -> None:
    text = f'[pools.p]\nendpoints = ["127.0.0.1:1"]\n[[routes]]\nmodel = "*"\npool = "p"\n{line}\n'
    with pytest.raises(BadDocument):
        compile_documents({"a.toml": text.encode()})
