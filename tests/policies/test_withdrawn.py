"""What is left of the last good documents while those on disk have a mistake: less, and never more."""

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_policies.documents import Snapshot, compile_documents
from oriel_policies.documents.packed import pack, unpack
from oriel_policies.documents.withdrawn import Withdrawn, withdrawn

from .packed_documents import DOCUMENT
from .renewed_documents import ODD, block, line, lines_of, same

BAD = {"b.toml": b"[tiers.silver]\nband = 1\n"}


def toml(name: str, *keys: str) -> bytes:
    table = "".join(f"{{ {key} }}, " for key in keys)
    return f'[tenants.{name}]\ntier = "gold"\nkeys = [{table}]\n'.encode()


def key(word: str, **more: str) -> str:
    return ", ".join([f'sha256 = "{hexed(word)}"', *(f"{name} = {value}" for name, value in more.items())])


def hexed(word: str) -> str:
    return sha256(word.encode()).hexdigest()


def digest(word: str) -> bytes:
    return sha256(word.encode()).digest()


GOOD = {
    "a.toml": DOCUMENT,
    "hand.toml": toml("ann", key("1", name='"laptop"'), key("2", expires="2040-01-01T00:00:00Z"))
    + toml("bob", key("3")),
    "t.ndjson": b"\n".join(line(f"t{number}", 100 + number) for number in range(40)),
}


def left(changes: Mapping[str, bytes | None], unreadable: tuple[str, ...] = ()) -> tuple[Withdrawn, Snapshot]:
    """changes: file name -> content, None for one that is gone."""
    documents = {**GOOD, **BAD, **changes}
    found = withdrawn(block(GOOD), {name: data for name, data in documents.items() if data is not None}, unreadable)
    return found, unpack(memoryview(b"".join(found.parts.block())))


def test_what_is_as_it_was_stays_whole() -> None:
    other_tier = DOCUMENT.replace(b"tiers.free", b"tiers.f")
    for changes in ({}, {"t.ndjson": GOOD["t.ndjson"] + b"\n\n"}, {"a.toml": other_tier}):
        found, snapshot = left(changes)
        same(snapshot, compile_documents(GOOD))
        assert (found.names, found.keys, found.mark) == ([], 0, "")


@pytest.mark.parametrize(
    ("changes", "gone", "names"),
    [
        ({"hand.toml": toml("ann", key("2")) + toml("bob", key("3"))}, {"1"}, ["key 'laptop' of ann"]),
        ({"hand.toml": toml("ann", key("1"), key("2"))}, {"3"}, ["tenant bob"]),
        ({"hand.toml": None}, {"1", "2", "3"}, ["tenant ann", "tenant bob"]),
        ({"t.ndjson": GOOD["t.ndjson"].replace(line("t7", 107), line("t7", 9))}, {"107"}, ["a key of t7"]),
        ({"t.ndjson": GOOD["t.ndjson"].replace(line("t7", 107), b"")}, {"107"}, ["tenant t7"]),
        # Mistakes of another kind in the file itself, and in the tenant.
        ({"hand.toml": b"x = 1\n" + toml("ann", key("1"), key("2")) + b"tiers = 3\n"}, {"3"}, ["tenant bob"]),
        # Somebody else's now: nobody's until the documents are good.
        ({"hand.toml": toml("ann", key("2"), key("3")) + toml("bob", key("1"))}, {"1", "3"}, None),
    ],
)
def test_what_readable_files_name_no_more_is_gone(
    changes: dict[str, bytes | None], gone: set[str], names: list[str] | None
) -> None:
    before = compile_documents(GOOD)
    found, snapshot = left(changes)
    assert set(before.keys) - set(snapshot.keys) == set(map(digest, gone)) and found.keys == len(gone) and found.mark
    assert names is None or found.names == names
    tenants = {name.removeprefix("tenant ") for name in found.names if name.startswith("tenant ")}
    expected = replace(
        before,
        tenants={name: tenant for name, tenant in before.tenants.items() if name not in tenants},
        keys={one: found for one, found in before.keys.items() if one in snapshot.keys},
    )
    same(snapshot, expected)


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("hand.toml", toml("bob", key("3")) + b"[tenants.ann\n"),  # half written
        ("hand.toml", b'[tenants.ann]\nkeys = "none"\n'),
        ("hand.toml", b"\xff"),
        ("t.ndjson", b"\n".join(GOOD["t.ndjson"].split(b"\n")[:20]) + b'\n{"name": "t2'),
    ],
)
def test_a_file_that_cannot_be_read_withdraws_nothing_and_keeps_nothing_of_others(file: str, data: bytes) -> None:
    other = {"t.ndjson": GOOD["t.ndjson"].replace(line("t7", 107), b""), "hand.toml": toml("ann", key("1"), key("2"))}
    found, _ = left({file: data})
    assert found.mark == ""
    found, snapshot = left({**other, file: data})
    assert found.names == (["tenant t7"] if file == "hand.toml" else ["tenant bob"])
    found, snapshot = left({**other, file: None}, (file,))
    assert found.keys == 1 and digest("1") in snapshot.keys and digest("101") in snapshot.keys


def test_a_key_that_ends_earlier_ends_then_and_one_that_ends_later_does_not() -> None:
    for was, now, ends in (("1", "2030-01-01T00:00:00Z", 1893456000.0), ("2", "2050-01-01T00:00:00Z", 2208988800.0)):
        other = key("2", expires="2040-01-01T00:00:00Z") if was == "1" else key("1", name='"laptop"')
        found, snapshot = left({"hand.toml": toml("ann", key(was, expires=now), other) + toml("bob", key("3"))})
        assert snapshot.keys[digest(was)].expires_at == ends and len(snapshot.keys) == 43
        assert (found.keys, bool(found.mark)) == ((1, True) if was == "1" else (0, False))
    assert snapshot.keys[digest("1")].name == "laptop"


def test_an_issuer_that_is_named_no_more_is_gone() -> None:
    document = DOCUMENT.replace(DOCUMENT[DOCUMENT.index(b"[issuers.i]") : DOCUMENT.index(b"[pools.p]")], b"")
    found, snapshot = left({"a.toml": document})
    assert found.names == ["issuer i"] and not snapshot.issuers and len(snapshot.keys) == 43


NAMES = st.dictionaries(
    st.sampled_from([f"n{number}" for number in range(9)]),
    st.tuples(st.integers(0, 12), st.just(1.0), st.just("gold")),
    max_size=9,
).map(lines_of)


@settings(max_examples=80, deadline=None)
@given(NAMES, st.lists(NAMES, max_size=2), st.integers(0, 9), st.lists(ODD, max_size=2))
def test_nothing_new_counts_and_only_what_is_named_still_does(
    good: list[bytes], now: list[list[bytes]], cut: int, odd: list[bytes]
) -> None:
    documents = {"a.toml": DOCUMENT, "t.ndjson": b"\n".join(good[:cut]), "u.ndjson": b"\n".join(good[cut:])}
    before = compile_documents(documents)
    changed = {"a.toml": DOCUMENT, **BAD}
    for file, lines in zip(("t.ndjson", "u.ndjson"), now, strict=False):
        changed[file] = b"\n".join(lines + odd)
    found = withdrawn(memoryview(pack(before, documents)), changed)
    snapshot = unpack(memoryview(b"".join(found.parts.block())))
    named = {
        (one, name)
        for file in ("t.ndjson", "u.ndjson")
        for one, name in _named(documents[file] if b"{" in odd and file in changed else changed.get(file, b""))
    }
    assert {(one.hex(), entry.tenant.name) for one, entry in snapshot.keys.items()} == {
        (one.hex(), entry.tenant.name) for one, entry in before.keys.items() if (one.hex(), entry.tenant.name) in named
    }


def _named(data: bytes) -> list[tuple[str, str]]:
    import msgspec

    tables = [msgspec.json.decode(each) for each in data.split(b"\n") if each.strip()]
    return [(entry["sha256"], table["name"]) for table in tables for entry in table["keys"]]
