import json
import time
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_wire.errors import BadMessage
from oriel_wire.v2.depth import MAX_DEPTH, check_depth
from oriel_wire.v2.http import decode_request


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def test_the_limit_is_exact() -> None:
    check_depth(nested(MAX_DEPTH))
    check_depth(b"[" + b"[],{}," * 500 + b"1]")
    for text in (nested(MAX_DEPTH + 1), b'{"a":' * 101 + b"1" + b"}" * 101, b"[" * 100_000):
        with pytest.raises(BadMessage, match=r"nesting depth exceeds maximum allowed limit \(100\)"):
            check_depth(text)


def test_brackets_in_text_neither_add_nor_take_away() -> None:
    check_depth(json.dumps(["[" * 100, "\\", '"[[' * 50, "{" * 100]).encode())
    hidden = b'["]]]]]]]]]]]]", "\\"]]]]]]]\\\\", ' * 101 + b"1" + b"]" * 101
    json.loads(hidden)
    with pytest.raises(BadMessage):
        check_depth(hidden)


def test_bytes_behind_the_json_part_do_not_count() -> None:
    entry = {"name": "x", "datatype": "UINT8", "shape": [1000], "parameters": {"binary_data_size": 1000}}
    text = json.dumps({"inputs": [entry]}).encode()
    for body in (text + b"[" * 1000, memoryview(text + b"[" * 1000)):
        (tensor,) = decode_request("m", "1", body, len(text)).inputs
        assert bytes(tensor.array) == b"[" * 1000


_documents = st.recursive(st.text('[]{}"\\a') | st.integers(), lambda inner: st.lists(inner, max_size=4))


@settings(max_examples=50)
@given(_documents, st.integers(0, 80), st.sampled_from([5, 64, 1 << 18]))
def test_agrees_with_a_parser(value: object, more: int, piece: int) -> None:
    """However many bytes it looks at in one go."""
    for _ in range(more):
        value = [value, "[" * 70]

    def depth(each: object) -> int:
        return 1 + max((depth(e) for e in each), default=0) if isinstance(each, list) else 0

    text = json.dumps(value, ensure_ascii=False).encode()
    with mock.patch("oriel_wire.v2.depth._PIECE", piece):
        if depth(value) > MAX_DEPTH:
            with pytest.raises(BadMessage):
                check_depth(text)
        else:
            check_depth(text)


def test_four_mebibytes_take_no_longer_than_a_stall_may() -> None:
    text = b'["' + b'\\"[]' * 1_000_000 + b'"' + b",[]" * 60 + b"]"
    began = time.thread_time()
    check_depth(text)
    assert time.thread_time() - began < 0.5  # some 30 ms of this thread, whoever else uses the machine
