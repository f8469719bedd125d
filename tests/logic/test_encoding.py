import base64
import json
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image
from pydantic import BaseModel

from oriel_logic.bodies import audio, npy
from oriel_logic.bodies.audio import Audio
from oriel_logic.bodies.encoding import HEAVY_BYTES, encode, framing, is_heavy
from oriel_logic.bodies.messages import Answer
from oriel_logic.bodies.tensors import HEADER_LENGTH, Tensors
from oriel_logic.errors import HandlerFailed
from oriel_logic.server.replies import reply_of
from oriel_wire.v2.http import decode_response

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)
RED = Image.new("RGBA", (3, 2), "red")
SOUND = Audio(np.zeros((4, 1), np.float32), 8000)


@dataclass
class Verdict:
    label: str
    scores: Any = None


class Person(BaseModel):
    name: str


class Point(msgspec.Struct):
    x: float


def sent(value: Any, media: str = "") -> tuple[bytes, str]:
    answer = encode(value, media, service="s")
    return answer.body, answer.content_type


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1}, {"a": 1}),
        ("hi", "hi"),
        (None, None),
        (Verdict("good", ROWS), {"label": "good", "scores": ROWS.tolist()}),
        (Point(1.5), {"x": 1.5}),
        ([Person(name="Ada")], [{"name": "Ada"}]),
        (np.float32(0.5), 0.5),
        ({"s": SOUND}, {"s": base64.b64encode(audio.encode(SOUND)).decode()}),
    ],
)
def test_values_are_json_unless_something_else_is_said(value: Any, text: Any) -> None:
    body, kind = sent(value)
    assert json.loads(body) == text and kind == "application/json"


def test_a_value_in_each_of_its_media_types() -> None:
    assert sent("größe", "text/plain") == ("größe".encode(), "text/plain; charset=utf-8")
    assert sent("a", "application/json") == (b'"a"', "application/json")
    assert sent(None, "image/png") == (b"null", "application/json")
    assert sent(b"\x00") == (b"\x00", "application/octet-stream")
    assert sent(SOUND)[0] == audio.encode(SOUND)
    assert npy.decode(sent(ROWS, "application/x-npy")[0]).tolist() == ROWS.tolist()
    for media, form in (("", "PNG"), ("image/png", "PNG"), ("image/jpeg", "JPEG")):
        body, kind = sent(RED, media)
        picture = Image.open(BytesIO(body))
        assert (picture.format, picture.size, kind) == (form, (3, 2), media or "image/png")
    text = json.loads(sent(RED, "application/json")[0])
    assert Image.open(BytesIO(base64.b64decode(text))).size == (3, 2)
    own = Answer(body=b"x", content_type="text/csv")
    assert encode(own, "application/json", service="s") is own


def test_tensors_are_a_v2_answer() -> None:
    answer = encode(Tensors(x=ROWS), "application/json", service="rows")
    assert answer.headers == () and decode_response(answer.body, None).outputs[0].array.tolist() == ROWS.tolist()
    answer = encode(Tensors(x=ROWS), "application/octet-stream", service="rows")
    ((name, length),) = answer.pairs
    assert name == HEADER_LENGTH
    response = decode_response(answer.body, int(length))
    assert response.model_name == "rows" and response.outputs[0].array.tolist() == ROWS.tolist()


@pytest.mark.parametrize(
    ("value", "media"),
    [
        (object(), ""),
        ({1: {2: object()}}, ""),
        (Tensors(x=np.array([1 + 1j])), ""),
        ("text", "image/png"),
        (Audio(np.zeros((1, 1, 1)), 8000), ""),
        (np.array([{}], dtype=object), "application/x-npy"),
    ],
)
def test_what_cannot_be_sent_is_the_services_failure(value: Any, media: str) -> None:
    with pytest.raises(HandlerFailed, match="cannot be sent as"):
        encode(value, media, service="s")


def test_pictures_and_large_arrays_are_for_a_worker() -> None:
    large = np.zeros(HEAVY_BYTES + 1, np.uint8)
    assert is_heavy(RED) and is_heavy(large) and is_heavy({"a": large})
    assert not is_heavy(ROWS) and not is_heavy({"a": [1]}) and not is_heavy("x" * HEAVY_BYTES)


def test_pieces_of_a_stream() -> None:
    assert framing("application/x-ndjson")({"a": "\n"}) == b'{"a":"\\n"}\n'
    assert framing("text/event-stream")({"a": 1}) == b'data: {"a":1}\n\n'
    assert framing("text/plain")("a") == b"a" and framing("application/octet-stream")(b"\x00") == b"\x00"
    with pytest.raises(TypeError):
        framing("text/plain")(1)


@pytest.mark.parametrize(
    "headers",
    [
        (("x-a\r\n", "b"),),
        (("x-a", "b\r\nset-cookie: c"),),
        (("content-length", "3"),),
        (("x" * 101, ""),),
        (("x", "é☃"),),
        ("x-a", "b"),
        (("x-a", 1),),
        {"x-a": 1},
        {"x-a\n": "b"},
        3,
    ],
)
def test_headers_that_cannot_be_sent_are_the_services_failure(headers: Any) -> None:
    with pytest.raises(HandlerFailed, match="header that cannot be sent"):
        encode(Answer(body=b"", headers=headers), "", service="s")


def test_headers_and_types_of_an_answer_go_out_as_they_are() -> None:
    answer = Answer(body=b"a", content_type="text/csv", headers=(("x-rows", "1"),))
    reply = reply_of(encode(answer, "application/json", service="s"))
    assert (reply.body, reply.content_type, reply.headers) == (b"a", "text/csv", (("x-rows", "1"),))
    several = [("set-thing", "1"), ("set-thing", "2")]
    for headers, wanted in (({"x-rows": "1"}, (("x-rows", "1"),)), (several, tuple(several))):
        answer = encode(Answer(body=b"a", headers=headers), "", service="s")
        assert reply_of(answer).headers == wanted
    with pytest.raises(HandlerFailed, match="content type that cannot be sent"):
        encode(Answer(body=b"", content_type="text/csv\r\nx: y"), "", service="s")
