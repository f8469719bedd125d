"""A snapshot renewed from the one before says exactly what compiling everything anew says, or gives up."""

from hashlib import sha256
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_policies.documents import compile_documents
from oriel_policies.documents import renewed as module
from oriel_policies.documents.packed import ROW, pack, parts, unpack
from oriel_policies.documents.renewed import renewed, wrong_lines
from oriel_policies.errors import BadDocument

from .packed_documents import DOCUMENT
from .renewed_documents import ODD, block, line, lines_of, same

OTHER_POOL = DOCUMENT.replace(b"127.0.0.1:1", b"127.0.0.1:9")
BY_HAND = DOCUMENT + b'[tenants.n1]\ntier = "gold"\nkeys = [{ sha256 = "%s" }]\n' % (b"ab" * 32)
OTHER_TIER = DOCUMENT.replace(b"tiers.free", b"tiers.cheap")


def many(count: int = 40) -> list[bytes]:
    return [line(f"t{number}", 100 + number) for number in range(count)]


def files(lines: list[bytes], document: bytes = DOCUMENT) -> dict[str, bytes]:
    return {"a.toml": document, "t.ndjson": b"\n".join(lines)}


def again(before: memoryview, documents: dict[str, bytes]) -> memoryview | None:
    found = renewed(before, documents)
    return None if found is None else memoryview(b"".join(found.block()))


GOOD = st.dictionaries(
    st.sampled_from([f"n{number}" for number in range(9)]),
    st.tuples(st.integers(0, 12), st.sampled_from([1.0, 2.0]), st.sampled_from(["gold", "gold", "free"])),
    max_size=9,
).map(lines_of)
SETS = st.lists(
    st.tuples(
        GOOD,
        st.one_of(st.just([]), st.just([]), st.lists(ODD, max_size=2)),
        st.integers(0, 9),
        st.sampled_from([DOCUMENT] * 6 + [OTHER_POOL, BY_HAND, OTHER_TIER, b"["]),
    ),
    min_size=2,
    max_size=6,
)


@settings(max_examples=70, deadline=None)
@given(SETS, st.integers(1, 64))
def test_what_is_renewed_is_what_is_compiled_anew(
    sets: list[tuple[list[bytes], list[bytes], int, bytes]], chunk: int
) -> None:
    before = block(files(many(4)))
    with patch.object(module, "_CHUNK", chunk):
        for good, odd, cut, document in sets:
            one, other = good[:cut] + odd, good[cut:]
            documents = {"a.toml": document, "t.ndjson": b"\n".join(one), "u.ndjson": b"\n".join(other)}
            found = again(before, documents)
            try:
                whole = compile_documents(documents)
            except BadDocument as error:
                assert found is None
                named = {(bad.file, bad.path, bad.reason) for bad in (error, *error.others)}
                assert {(bad.file, bad.path, bad.reason) for bad in _wrong(before, documents)} <= named
                continue
            assert not _wrong(before, documents)
            if found is not None:
                same(unpack(found), whole)
                rows = parts(found)
                for section in (bytes(rows.keys), bytes(rows.tenants)):
                    digests = [section[at : at + 32] for at in range(0, len(section), ROW)]
                    assert digests == sorted(set(digests))
            before = found if found is not None else block(documents)


def _wrong(before: memoryview, documents: dict[str, bytes]) -> list[BadDocument]:
    """Only ever mistakes that the compiler finds as well."""
    try:
        rest = compile_documents({"a.toml": documents["a.toml"]})
    except BadDocument:
        return []
    return wrong_lines(before, documents, rest)


def test_a_bad_line_among_many_is_named_without_the_others() -> None:
    before = block(files(many()))
    lines = many()
    lines[7:9] = [line("t7", 107, tier="silver"), b"{", lines[8], line("t7")]
    rest = compile_documents(files([]))
    wrong = wrong_lines(before, files(lines), rest)
    assert [str(each) for each in wrong] == [
        "t.ndjson:9: not JSON: Input data was truncated",
        "t.ndjson:8: tenants.t7.tier: no tier is named 'silver': there are free, gold",
    ]
    assert wrong_lines(before, files(many()), rest) == []
    with patch.object(module, "_MANY", 1):
        assert wrong_lines(before, files(lines), rest) == []


def test_a_line_whose_tenant_was_named_before_is_left_to_the_compiler() -> None:
    """The compiler says "defined twice" of it and takes nothing from it, so its key is free for others."""
    lines = [line("n3", 1), line("n9", 2)]
    before = block(files(lines))
    rest = compile_documents(files([]))
    for added in ([line("n3", 3), line("n1", 3)], [line("n9", tier="none")]):
        documents = files([*lines, *added])
        with pytest.raises(BadDocument, match="defined twice") as refused:
            compile_documents(documents)
        assert refused.value.others == ()
        assert wrong_lines(before, documents, rest) == []


@pytest.mark.parametrize("place", [0, 1, 20, 38, 39])
@pytest.mark.parametrize("chunk", [1, 7, 100, 32768])
def test_a_key_that_is_exchanged_is_taken_from_its_line_alone(place: int, chunk: int) -> None:
    lines = many()
    before = block(files(lines))
    lines[place] = line(f"t{place}", 9)
    with patch.object(module, "_CHUNK", chunk), patch.object(module, "_tables", wraps=module._tables) as read:
        found = again(before, files(lines))
    assert found is not None and [len(call.args[0]) for call in read.call_args_list] == [1, 1]
    snapshot = unpack(found)
    assert sha256(b"%d" % (100 + place)).digest() not in snapshot.keys
    assert snapshot.keys[sha256(b"9").digest()].tenant is snapshot.tenants[f"t{place}"]
    same(snapshot, compile_documents(files(lines)))


def test_a_line_that_goes_comes_or_moves_is_enough() -> None:
    lines = many()
    before = block(files(lines))
    for changed in (lines[1:], lines[:-1], [line("new", 7), *lines], [*lines, line("new", 7)], lines[::-1], lines):
        found = again(before, files(changed))
        assert found is not None
        same(unpack(found), compile_documents(files(changed)))


def test_documents_beside_the_tenants_are_compiled_anew() -> None:
    lines = many()
    before = block(files(lines))
    for document in (OTHER_POOL, BY_HAND, DOCUMENT):
        found = again(before, files(lines, document))
        assert found is not None
        same(unpack(found), compile_documents(files(lines, document)))
        before = found


@pytest.mark.parametrize(
    "changed",
    [
        files([*many(), line("t3", 7)]),  # a name that another line has
        files([*many(), line("new", 103)]),  # a key that another tenant has
        files([*many(), many()[0]]),
        files([*many(), line("new", 7), line("new", 7)]),
        files([*many(), line("new", 7, tier="silver")]),
        files([*many(), b"{"]),
        files([line("new", 7), *many()[1:]], b"nothing"),
        files(many(), DOCUMENT.replace(b"tiers.free", b"tiers.cheap")),  # a name that lines may use
        files([*many(), line("n1", 7)], BY_HAND),
        files(many(), DOCUMENT.replace(b"band = 1", b"band = 0").replace(b"target_ms = 200", b"target_ms = 50")),
    ],
)
def test_what_is_wrong_or_may_be_is_left_to_the_compiler(changed: dict[str, bytes]) -> None:
    assert renewed(block(files(many())), changed) is None


def test_when_much_has_changed_everything_is_compiled() -> None:
    """And records that nobody names any more do not pile up."""
    lines = many()
    before = block(files(lines))
    assert renewed(before, files([line(f"t{number}", number) for number in range(40)])) is None
    compiled = 0
    for turn in range(200):
        lines[turn % 40] = line(f"t{turn % 40}", 1000 + turn)
        found = again(before, files(lines))
        compiled += found is None
        before = found if found is not None else block(files(lines))
        piece = parts(before)
        assert len(piece.records) <= 2 * piece.fresh
        same(unpack(before), compile_documents(files(lines)))
    assert 1 <= compiled <= 8


def test_a_block_without_its_documents_cannot_be_renewed() -> None:
    lines = files(many())
    assert renewed(memoryview(pack(compile_documents(lines))), lines) is None
