"""Where the rules of bodies that name a model turn: sizes, texts, lists, depths, parts of a form and of a refusal."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.identity.named_models import judge_body, judge_head, naming_another, without_state
from oriel_policies.documents import Tenant

TENANT = cast(Tenant, SimpleNamespace(may_use_model=lambda name: name == "m", models=("m",)))
MIB = 1024 * 1024


def head(*, length: int | None = None, kind: str = "application/json", chunked: bool = False, query: str = "") -> Any:
    sent = [("content-type", kind)]
    return SimpleNamespace(content_length=length, chunked=chunked, query=query, sent_on=lambda: sent)


def judged(body: bytes, form: str = "json", kind: str = "application/json") -> str:
    return judge_body(head(kind=kind), form, body, TENANT)


def refusal(body: bytes, form: str = "json", kind: str = "application/json") -> Refused:
    with pytest.raises(Refused) as caught:
        judged(body, form, kind)
    return caught.value


def test_a_body_has_at_most_4_mib_as_announced_and_as_read() -> None:
    judge_head(head(length=4 * MIB), "json")
    judge_head(head(length=None, chunked=True), "json")
    with pytest.raises(Refused) as caught:
        judge_head(head(length=4 * MIB + 1), "json")
    assert caught.value.outcome is Outcome.TOO_LARGE
    assert "at most 4194304 bytes of JSON, with at most 32768 keys and texts and 65536 lists" in str(caught.value)
    assert judged(b'{"model":"m"}'.ljust(4 * MIB)) == "m"
    assert refusal(b'{"model":"m"}'.ljust(4 * MIB + 1)).outcome is Outcome.TOO_LARGE


def test_a_body_has_at_most_32768_texts_and_65536_lists() -> None:
    for texts, outcome in ((32_768, None), (32_769, Outcome.TOO_LARGE)):
        body = b'{"model":"m","x":[%b]}' % b",".join([rb'"\""'] * (texts - 3))
        assert (judged(body) == "m") if outcome is None else refusal(body).outcome is outcome
    for lists, outcome in ((65_536, None), (65_537, Outcome.TOO_LARGE)):
        body = b'{"model":"m","x":[%b]}' % b",".join([b"[]", b"{}"] * 32_768)[: 3 * (lists - 2) - 1]
        assert body.count(b"[") + body.count(b"{") == lists
        assert (judged(body) == "m") if outcome is None else refusal(body).outcome is outcome


@pytest.mark.parametrize(("levels", "taken"), [(63, True), (64, True), (65, False)])
def test_a_body_has_at_most_64_levels(levels: int, taken: bool) -> None:
    for one, end in ((b"[", b"]"), (b'{"a":', b"}")):
        inner = one * (levels - 1) + b"1" + end * (levels - 1)
        body = b'{"model":"m","text":"[[[[","x":%b,"y":[[],[],{}]}' % inner
        assert (judged(body) == "m") if taken else "not one JSON object" in str(refusal(body))


@pytest.mark.parametrize(("size", "taken"), [(1_048_575, True), (1_048_576, True), (1_048_577, False)])
def test_tools_have_at_most_1_mib(size: int, taken: bool) -> None:
    body = b'{"model":"m","tools":[%b]}' % (b" " * (size - 2))
    if taken:
        assert judged(body) == "m"
        return
    found = refusal(body)
    assert (found.outcome, str(found)) == (Outcome.TOO_LARGE, "this key's `tools` have at most 1048576 bytes")


def test_a_path_of_lists_takes_no_body() -> None:
    for form in ("list", "entry"):
        judge_head(head(length=0), form)
        judge_head(head(), form)
        for sent in (head(length=1), head(chunked=True)):
            with pytest.raises(Refused, match="takes no body"):
                judge_head(sent, form)


def part(name: str, data: bytes, more: str = "") -> bytes:
    return f'Content-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + data


def form(*parts: bytes) -> bytes:
    return b"".join(b"--b\r\n%b\r\n" % each for each in parts) + b"--b--\r\n"


KIND = "multipart/form-data; boundary=b"


@pytest.mark.parametrize(("parts", "taken"), [(1, True), (255, True), (256, True), (257, False)])
def test_a_form_has_at_most_256_parts_which_may_be_empty(parts: int, taken: bool) -> None:
    body = form(*[part("a", b"")] * (parts - 1), part("model", b"m"))
    assert (judged(body, "form", KIND) == "m") if taken else "not a plain" in str(refusal(body, "form", KIND))


@pytest.mark.parametrize(("size", "taken"), [(4095, True), (4096, True), (4097, False)])
def test_the_head_of_a_part_has_at_most_4096_bytes_with_the_line_before_it(size: int, taken: bool) -> None:
    line = len(b"\r\n" + part("model", b"", "\r\nContent-Type: text/plain"))
    body = form(part("model", b"m", f"\r\nContent-Type: {' ' * (size - line)}text/plain"))
    assert body.index(b"\r\n\r\n") + 4 - len(b"--b") == size
    assert (judged(body, "form", KIND) == "m") if taken else "not a plain" in str(refusal(body, "form", KIND))


@pytest.mark.parametrize(
    ("more", "taken"),
    [
        ("\r\nX: a b", True),
        ("\r\n more", False),
        ("\r\n\tmore", False),
        ("\r\nX: a\rb", False),
        ("\r\nX: a\nb", False),
    ],
)
def test_a_line_in_the_head_of_a_part_is_whole(more: str, taken: bool) -> None:
    body = form(part("a", b"", more), part("model", b"m"))
    assert (judged(body, "form", KIND) == "m") if taken else "not a plain" in str(refusal(body, "form", KIND))


def test_a_form_names_one_model_and_ends_with_its_last_mark() -> None:
    assert judged(form(part("model", b"m")).removesuffix(b"\r\n"), "form", KIND) == "m"
    for body in (form(part("model", b"m")) + b"\r\n", form(part("model", b"m")) + b"x"):
        assert "not a plain" in str(refusal(body, "form", KIND))
    assert "more than once" in str(refusal(form(*[part("model", b"m")] * 2), "form", KIND))
    assert "name the model" in str(refusal(form(part("a", b"m")), "form", KIND))
    for more in ('; filename="x"', "; filename*=x", "\r\nContent-Type: text/html"):
        assert "plain text" in str(refusal(form(part("model", b"m", more)), "form", KIND))


def test_a_refusal_shows_64_letters_of_a_field_and_128_of_a_model() -> None:
    field = "model" + "x" * 100
    for found in (refusal(b'{"model":"m","%b":1}' % field.encode()), refusal(form(part(field, b"")), "form", KIND)):
        assert f"'{field[:64]}' may name a model" in str(found)
    sent = head()
    sent.sent_on = lambda: [(field, "m"), ("content-type", "application/json")]
    with pytest.raises(Refused, match=f"the header field {field[:64]} may"):
        judge_head(sent, "json")
    unknown = refusal(b'{"model":"%b"}' % (b"n" * 200))
    assert f"no model '{'n' * 128}' here" in str(unknown) and unknown.outcome is Outcome.NOT_FOUND


@pytest.mark.parametrize("known", [False, True])
def test_a_body_whose_state_is_judged_has_at_most_8_mib(known: bool) -> None:
    assert without_state(b'{"input":"a"}'.ljust(8 * MIB), judged=known) == b'{"input":"a"}'
    with pytest.raises(Refused, match="8388608") as caught:
        without_state(b'{"input":"a"}'.ljust(8 * MIB + 1), judged=known)
    assert caught.value.outcome is Outcome.TOO_LARGE


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("gap", [b"", b" ", b"\r\n\t"])
def test_the_items_of_an_input_are_judged_wherever_the_first_one_begins(gap: bytes, known: bool) -> None:
    item = b'{"type":"item_reference","id":"a"}'
    with pytest.raises(Refused, match="'input' names what is stored"):
        without_state(b'{"input":[%b%b]}' % (gap, item), judged=known)
    with pytest.raises(Refused, match="a text or a list of objects"):
        without_state(b'{"input":{%b"type":"message"}}' % gap, judged=known)
    assert without_state(b'{"input":"[{"}', judged=known) == b'{"input":"[{"}'


def test_another_model_is_named_only_where_every_reader_finds_it() -> None:
    assert naming_another(b'{"model":"m","x":[1]}', "n") == b'{"model":"n","x":[1]}'
    for body in (b"{}", b'{"model":1}', b'{"model":"m","model":"m"}', b"[]", b""):
        assert naming_another(body, "n") is None
