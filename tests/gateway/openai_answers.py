"""Requests of the OpenAI API, and answers of a stand-in for its servers."""

import json
from typing import Any

from .stack import Seen

CHAT = "/v1/chat/completions"
JSON = "content-type: application/json\r\n"
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 20,
    "total_tokens": 30,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def json_answer(content: dict[str, Any], more: str = "") -> bytes:
    data = json.dumps(content).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{more}content-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def whole(_: Seen) -> bytes:
    said = 'they wrote "usage": {"total_tokens": 999}'
    return json_answer({"choices": [{"message": {"content": said}}], "usage": USAGE})


def streamed(events: list[str]) -> bytes:
    chunks = [f"data: {event}\n\n".encode() for event in events]
    body = b"".join([b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks])
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n%b0\r\n\r\n" % body


def chat(most: int | None = 100, text: str = "hi", **more: object) -> bytes:
    asked = {} if most is None else {"max_tokens": most}
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **asked, **more}).encode()
