"""Where the rules of bodies that name a model turn: sizes, texts, lists, depths, parts of a form and of a refusal."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.identity.named_models import judge_body, judge_head, naming_another, without_state
from oriel_policies.documents import Tenant
from oriel_policies.documents.promises import fits

NAMES = ("m", "small-*", "org/name-1:2@b")
TENANT = cast(
    Tenant, SimpleNamespace(may_use_model=lambda name: any(fits(pattern, name) for pattern in NAMES), models=NAMES)
)
MIB = 1024 * 1024


def head(*, length: int | None = None, kind: str = "application/json", chunked: bool = False, query: str = "") -> Any:
    sent = [("content-type", kind)]
    return SimpleNamespace(content_length=length, chunked=chunked, query=query, sent_on=lambda: sent)


def judged(body: bytes | str, form: str = "json", kind: str = "application/json") -> str:
    return judge_body(head(kind=kind), form, body.encode() if isinstance(body, str) else body, TENANT)


def refusal(body: bytes | str, form: str = "json", kind: str = "application/json") -> Refused:
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
    assert (found.outcome, str(found)) == (Outcome.TOO_LARGE, "with this key, `tools` may have at most 1048576 bytes")


def test_a_path_of_lists_takes_no_body() -> None:
    for form in ("list", "entry"):
        judge_head(head(length=0), form)
        judge_head(head(), form)
        for sent in (head(length=1), head(chunked=True)):
            with pytest.raises(Refused, match="takes no body"):
                judge_head(sent, form)


def part(name: str, data: str, more: str = "") -> str:
    return f'Content-Disposition: form-data; name="{name}"{more}\r\n\r\n{data}'


def form(*parts: str) -> str:
    return "".join(f"--b\r\n{each}\r\n" for each in parts) + "--b--\r\n"


KIND = "multipart/form-data; boundary=b"


@pytest.mark.parametrize(("parts", "taken"), [(1, True), (255, True), (256, True), (257, False)])
def test_a_form_has_at_most_256_parts_which_may_be_empty(parts: int, taken: bool) -> None:
    body = form(*[part("a", "")] * (parts - 1), part("model", "m"))
    assert (judged(body, "form", KIND) == "m") if taken else "in its simplest form" in str(refusal(body, "form", KIND))


@pytest.mark.parametrize(("size", "taken"), [(4095, True), (4096, True), (4097, False)])
def test_the_head_of_a_part_has_at_most_4096_bytes_with_the_line_before_it(size: int, taken: bool) -> None:
    line = len("\r\n" + part("model", "", "\r\nContent-Type: text/plain"))
    body = form(part("model", "m", f"\r\nContent-Type: {' ' * (size - line)}text/plain"))
    assert body.index("\r\n\r\n") + 4 - len("--b") == size
    assert (judged(body, "form", KIND) == "m") if taken else "in its simplest form" in str(refusal(body, "form", KIND))


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
    body = form(part("a", "", more), part("model", "m"))
    assert (judged(body, "form", KIND) == "m") if taken else "in its simplest form" in str(refusal(body, "form", KIND))


def test_a_refusal_shows_64_letters_of_a_field_and_128_of_a_model() -> None:
    field = "model" + "x" * 100
    for found in (refusal(b'{"model":"m","%b":1}' % field.encode()), refusal(form(part(field, "")), "form", KIND)):
        assert f"'{field[:64]}' may name a model" in str(found)
    sent = head()
    sent.sent_on = lambda: [(field, "m"), ("content-type", "application/json")]
    with pytest.raises(Refused, match=f"header field {field[:64]} may"):
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


SMALL = '"model": "small-1b"'
ESCAPED = r'"\u006d\u006Fdel": "\u0062ig-70b"'
TWICE = "more than once"
TWO_LEVELS = '{"a":['
WIDE = '{"a": [1, "]}"], "b": {}},'  # as many brackets as one likes, but only three levels of them
ESCAPES = r"\\\\ \" "


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (f"{{{SMALL}}}", ""),
        (f'{{"a": 1, {SMALL}, "messages": [{{"content": "\\"model\\": \\"big-70b\\""}}]}}', ""),
        (f'{{{SMALL}, "tools": [{{"function": {{"parameters": {{"model": {{"type": "string"}}}}}}}}]}}', ""),
        (f'{{"tools": null, {SMALL}, "metadata": {{"model": "Golf"}}}}', ""),
        (r'{"\u006dodel": "sm\u0061ll-1b"}', ""),
        ('{"model": "org/name-1:2@b"}', ""),
        ('{"model": "big-70b"}', "there is no model 'big-70b' here"),
        (f"{{{ESCAPED}}}", "there is no model 'big-70b' here"),
        ('{"model": "small-/../big-70b"}', "there is no model"),
        ('{"model": "small-1b\\u0000"}', "there is no model"),
        ('{"model": " small-1b"}', "there is no model"),
        ("{}", "name the model"),
        ('{"model": null}', "has to be a name"),
        ('{"model": ""}', "has to be a name"),
        ('{"model": ["small-1b"]}', "has to be a name"),
        (f'{{"model": "big-70b", {SMALL}}}', TWICE),
        (f'{{{SMALL}, "model": "big-70b"}}', TWICE),
        (f"{{{SMALL}, {SMALL}}}", TWICE),
        (f"{{{SMALL}, {ESCAPED}}}", TWICE),
        (f"{{{ESCAPED}, {SMALL}}}", TWICE),
        (f'{{"x": {{"model": 1}}, "x": 2, {SMALL}}}', TWICE),
        (f'{{{SMALL}, "MODEL": "big-70b"}}', "may name a model"),
        (f'{{{SMALL}, "Mod\\u0065l": "big-70b"}}', "may name a model"),
        (f'{{{SMALL}, "models": ["big-70b"]}}', "may name a model"),
        (f'{{{SMALL}, "fallbacks": ["big-70b"]}}', "may name a model"),
        (f'{{{SMALL}, "lora_path": "big"}}', "may name a model"),
        (f'{{{SMALL}, "Fallbac\\u212as": "big"}}', "may name a model"),
        (f'{{{SMALL}, "{"x" * 256}": 1}}', ""),
        (f'{{{SMALL}, "{"x" * 257}": 1}}', "may name a model"),
        (f'{{{SMALL}, "tools": [{{"type": "image_generation", "model": "big-70b"}}]}}', "big-70b"),
        (f'{{{SMALL}, "tools": [{{"model": "small-2"}}, {{"model": "big", "model": "small-1"}}]}}', TWICE),
        (f'{{{SMALL}, "tools": "big"}}', "not a list"),
        (f"{{{SMALL}}} {{}}", "not one JSON object"),
        (f"\ufeff{{{SMALL}}}", "not one JSON object"),
        (f"[{{{SMALL}}}]", "not one JSON object"),
        (f'{{{SMALL}, "x": NaN}}', "not one JSON object"),
        (f'{{{SMALL}, "x": {TWO_LEVELS * 32}1{"]}" * 32}}}', "not one JSON object"),
        (f'{{{SMALL}, "x": [{WIDE * 40}1, "{ESCAPES}{"[" * 100}"]}}', ""),
        ("model=small-1b", "not one JSON object"),
        ("", "the body is empty"),
    ],
)
def test_the_model_that_a_body_names_is_judged(body: str, says: str) -> None:
    if says:
        assert says in str(refusal(body))
    else:
        assert TENANT.may_use_model(judged(body))


FILE = part("file", "RIFF\0\r\n\r\nmodel", '; filename="a.wav"\r\nContent-Type: audio/wav')
GOOD = part("model", "small-1b")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (form(FILE, GOOD, part("timestamp_granularities[]", "word")), ""),
        (form(GOOD).removesuffix("\r\n"), ""),
        (form(FILE, part("model", "big-70b")), "there is no model 'big-70b' here"),
        (form(FILE), "name the model"),
        (form(GOOD, part("model", "big-70b")), TWICE),
        (form(GOOD, part("Model", "big-70b")), "may name a model"),
        (form(GOOD, part("model[]", "big-70b")), "may name a model"),
        (form(part("model", "small-1b", '; filename="x"')), "plain text"),
        (form(part("model", "small-1b", "\r\nContent-Transfer-Encoding: base64")), "plain text"),
        (form(part("model", "small-1b", "\r\nContent-Type: text/plain; charset=utf-7")), "plain text"),
        (form(GOOD, part('mod\\"el', "x")), "in its simplest form"),
        (form(GOOD, part("a", "x", '; name="model"')), "in its simplest form"),
        (form(GOOD, "Content-Disposition: form-data; name*=utf-8''model\r\n\r\nbig-70b"), "in its simplest form"),
        (form(GOOD, part("a", "x", '\r\nContent-Disposition: form-data; name="model"')), "in its simplest form"),
        (form(GOOD, 'Content-Disposition: form-data;\r\n name="model"\r\n\r\nbig-70b'), "in its simplest form"),
        ('{"model": "big-70b"}\r\n' + form(GOOD), "in its simplest form"),
        (form(GOOD) + '{"model": "big-70b"}', "in its simplest form"),
        (form(GOOD).removesuffix("--\r\n"), "in its simplest form"),
        (
            form(GOOD, part("a", '\n--b\nContent-Disposition: form-data; name="model"\n\nbig-70b')),
            "in its simplest form",
        ),
        (form(GOOD, part("a", "x")).replace("--b\r\n", "--b \r\n"), "in its simplest form"),
        ('{"model": "small-1b"}', "in its simplest form"),
    ],
)
def test_the_model_that_a_form_names_is_judged(body: str, says: str) -> None:
    if says:
        assert says in str(refusal(body, "form", KIND))
    else:
        assert judged(body, "form", KIND) == "small-1b"
