"""Chat, completions and responses through the official client, with a model that repeats what it was told."""

import asyncio
import gc
import json
from typing import Any

import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from oriel_logic.errors import ModelInputWrong
from oriel_logic.openai import language
from oriel_logic.openai.reading import Part
from oriel_logic.openai.schema import ChatRequest, parse
from oriel_logic.server.connection import ServiceConnection
from oriel_logic.testing.models import BoundFakes
from oriel_wire.context import read_headers

from ...waiting import until
from .language_double import LanguageDouble

Chat = tuple[openai.AsyncOpenAI, Any]
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALLED = read_headers({}.get, trusted=False).at(0.0, 1.0)
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'


def asked(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": text}], **more}


async def test_a_chat_is_rendered_answered_and_counted(chat: Chat, double: LanguageDouble) -> None:
    client, stack = chat
    messages: Any = [{"role": "developer", "content": "be brief"}, *HELLO]
    raw = await client.chat.completions.with_raw_response.create(model="chat", messages=messages)
    answer = raw.parse()
    assert double.prompts == ["<|begin|><|system|>be brief<|user|>hello<|answer|>"]
    assert double.sampling[0]["max_tokens"] == 4096, "the context is the bound where the caller sets none"
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("hello", "assistant", "stop")
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    size = len(double.prompts[0])
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (size, 5)
    assert answer.usage.prompt_tokens_details.cached_tokens == size // 2
    assert "logic-decode" in raw.headers["server-timing"]


async def test_a_stream_says_the_same_in_pieces(chat: Chat) -> None:
    client, _ = chat
    stream = await client.chat.completions.create(**asked(stream=True, stream_options={"include_usage": True}))
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].object == "chat.completion.chunk"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hello"
    assert chunks[-2].choices[0].finish_reason == "stop" and not chunks[-2].choices[0].delta.content
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and all(chunk.usage is None for chunk in chunks[:-1])
    async with client.chat.completions.stream(**asked("a b", stop=" ")) as events:
        final = (await events.get_final_completion()).choices[0]
    assert (final.message.content, final.finish_reason) == ("a", "stop"), "the client's own accumulating reader agrees"


@pytest.mark.parametrize("served_as", ["priority", "flex", "default"])
async def test_answers_name_the_service_tier_by_which_the_gateway_served_them(chat: Chat, served_as: Any) -> None:
    client, _ = chat
    given: Any = {"model": "chat", "service_tier": "priority", "extra_headers": {"x-oriel-service-tier": served_as}}
    assert (await client.chat.completions.create(messages=HELLO, **given)).service_tier == served_as
    stream = await client.chat.completions.create(messages=HELLO, stream=True, **given)
    assert {chunk.service_tier async for chunk in stream} == {served_as}
    assert (await client.responses.create(input="hello", **given)).service_tier == served_as
    events = [each async for each in await client.responses.create(input="hello", stream=True, **given)]
    assert events[-1].type == "response.completed" and events[-1].response.service_tier == served_as
    answer = await client.completions.create(
        prompt="hello",
        extra_body={"service_tier": "priority"},
        **{name: value for name, value in given.items() if name != "service_tier"},
    )
    assert answer.model_extra == {"service_tier": served_as}


async def test_completions_of_texts_and_of_token_ids(chat: Chat, double: LanguageDouble) -> None:
    client, _ = chat
    for prompt in ("say", list(b"say")):
        answer = await client.completions.create(model="chat", prompt=prompt, logprobs=0)
        assert (answer.choices[0].text, answer.object) == ("say", "text_completion")
        assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.tokens == ["s", "a", "y"]
    assert [each["max_tokens"] for each in double.sampling] == [16, 16], "the default of that API"
    stream = await client.completions.create(model="chat", prompt="say", stream=True, max_tokens=2)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert "".join(each.text for each in chunks) == "sa" and chunks[-1].finish_reason == "length"


async def test_several_choices_of_several_prompts(chat: Chat, double: LanguageDouble) -> None:
    client, _ = chat
    given: dict[str, Any] = {"model": "chat", "prompt": ["one", "three"], "n": 2, "seed": 2**63 - 1}
    answer = await client.completions.create(**given)
    assert [(each.index, each.text) for each in answer.choices] == list(enumerate(["one", "one", "three", "three"]))
    assert answer.usage is not None and answer.usage.prompt_tokens == 8, "a prompt counts once"
    assert answer.usage.completion_tokens == 16
    assert sorted({each["seed"] for each in double.sampling}) == [0, 2**63 - 1], "choices differ by their seed"
    texts = [""] * 4
    async for chunk in await client.completions.create(**given, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [each.text for each in answer.choices]


async def test_sampling_reaches_the_model_by_its_own_names(chat: Chat, double: LanguageDouble) -> None:
    client, _ = chat
    given = {"temperature": 0.5, "top_p": 0.9, "presence_penalty": 1.0, "frequency_penalty": -1.0, "seed": 3}
    await client.chat.completions.create(
        **asked(**given, stop=["x", "y"], max_completion_tokens=7, logprobs=True, extra_body={"top_k": 4})
    )
    assert double.sampling == [{**given, "top_k": 4, "stop": ["x", "y"], "max_tokens": 7, "logprobs": 0}]


async def test_log_probabilities_of_the_chosen_tokens(chat: Chat) -> None:
    client, _ = chat
    whole = (await client.chat.completions.create(**asked("hé", logprobs=True))).choices[0].logprobs
    assert whole is not None and whole.content is not None
    assert [(each.token, each.bytes, each.logprob) for each in whole.content] == [
        ("h", [104], -0.5),
        ("é", [195, 169], -0.5),
    ]
    stream = await client.chat.completions.create(**asked("hé", logprobs=True, stream=True))
    found = [chunk.choices[0].logprobs async for chunk in stream]
    assert [each.token for logprobs in found if logprobs for each in logprobs.content or ()] == ["h", "é"]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_tool_call_in_the_models_words_becomes_one(chat: Chat, double: LanguageDouble, streams: bool) -> None:
    client, _ = chat
    said = f"I look.<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>"
    double.says = lambda prompt: said
    if streams:
        async with client.chat.completions.stream(**asked(tools=[WEATHER])) as events:
            choice: Any = (await events.get_final_completion()).choices[0]
    else:
        choice = (await client.chat.completions.create(**asked(tools=[WEATHER]))).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    assert [each.function.name for each in choice.message.tool_calls] == ["weather", "weather"]
    assert json.loads(choice.message.tool_calls[1].function.arguments) == {"city": "Paris"}
    assert len({each.id for each in choice.message.tool_calls}) == 2


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_call_that_is_asked_for_is_guided(chat: Chat, double: LanguageDouble, choice: Any) -> None:
    client, _ = chat
    double.says = lambda prompt: CALL if choice == "required" else '{"city": "Paris"}'
    for streams in (False, True):
        given = asked(tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
        if streams:
            async with client.chat.completions.stream(**given) as events:
                message: Any = (await events.get_final_completion()).choices[0].message
        else:
            message = (await client.chat.completions.create(**given)).choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
        assert not message.content
    guide = double.sampling[0]["guide"]
    schema = json.loads(guide["text"])
    wanted = WEATHER["function"]["parameters"]
    assert guide["kind"] == "json_schema" and wanted in (schema, schema["properties"].get("arguments"))


async def test_tools_and_their_results_reach_the_prompt(chat: Chat, double: LanguageDouble) -> None:
    client, _ = chat
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Paris"}'}}
    messages: Any = [
        {"role": "system", "content": "be brief"},
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny.", "tool_calls": []},
        *HELLO,
    ]
    await client.chat.completions.create(model="chat", messages=messages, tools=[WEATHER])
    assert double.prompts[0].startswith("<|begin|><|system|>be brief\n\nYou can call these functions:\n<tools>\n")
    assert '"name": "weather"' in double.prompts[0] and "<|tool|>sunny<|assistant|>It is sunny." in double.prompts[0]
    await client.chat.completions.create(model="chat", messages=messages, tools=[WEATHER], tool_choice="none")
    assert double.prompts[1].startswith("<|begin|><|system|>be brief<|user|>hello")


async def test_an_answer_in_json_is_guided(chat: Chat, double: LanguageDouble) -> None:
    client, _ = chat
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    forms: list[Any] = [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
        {"type": "text"},
    ]
    for form in forms:
        await client.chat.completions.create(**asked(response_format=form))
    guides = [each.get("guide") for each in double.sampling]
    assert [each and json.loads(each["text"]) for each in guides] == [{"type": "object"}, schema, None]


async def test_a_guide_that_the_engine_refuses_is_named_by_its_parameter(chat: Chat, double: LanguageDouble) -> None:
    client, _ = chat

    def refuse(prompt: str) -> str:
        raise ModelInputWrong("model 'double' refused its inputs: the guide has 9 levels, at most 8 are compiled")

    double.says = refuse
    form: Any = {"type": "json_object"}
    with pytest.raises(openai.BadRequestError, match="the guide has") as wrong:
        await client.chat.completions.create(**asked(response_format=form))
    assert wrong.value.param == "response_format"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(**asked(tools=[WEATHER], tool_choice="required"))
    assert wrong.value.param == "tools"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.responses.create(model="chat", input="hello", text={"format": form})
    assert wrong.value.param == "text"


async def test_thoughts_are_kept_apart(chat: Chat, double: LanguageDouble) -> None:
    client, _ = chat
    double.configured["double"] |= {
        "oriel.chat_template": "{{ messages[0].content }}{% if thinking %}<think>{% endif %}"
    }
    double.says = lambda prompt: (
        "because" + "</think>\n\nyes" if prompt.endswith("<think>") else "<think>because</think>yes"
    )
    for more in ({}, {"extra_body": {"chat_template_kwargs": {"thinking": True}}}):
        message = (await client.chat.completions.create(**asked(**more))).choices[0].message
        assert (message.content, message.model_extra) == ("yes", {"reasoning_content": "because"})
    stream = await client.chat.completions.create(**asked(stream=True))
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join((each.model_extra or {}).get("reasoning_content", "") for each in deltas) == "because"
    assert "".join(each.content or "" for each in deltas) == "yes"


async def test_what_cannot_be_answered_is_refused_by_name(chat: Chat, double: LanguageDouble) -> None:
    client, _ = chat
    cases: list[tuple[dict[str, Any], str, str, str | None]] = [
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "5", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "a<|end|>b"}]}, "messages", "control token <|end|>", None),
        ({"logit_bias": {"1": 5}}, "logit_bias", "single tokens", None),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs", "chosen token", None),
        ({"tool_choice": "required"}, "tool_choice", "is empty", None),
        ({"store": True, "extra_body": {"min_p": 0.1}}, "min_p", "has no parameter", "unknown_parameter"),
    ]
    for changes, param, text, code in cases:
        with pytest.raises(openai.BadRequestError, match=text) as wrong:
            await client.chat.completions.create(**{**asked(), **changes})
        assert wrong.value.param == param and (code is None or wrong.value.code == code)
    assert len(double.prompts) == 1, "only the one that the model refused was sent"


async def test_a_model_without_a_template_is_for_completions(chat: Chat, double: LanguageDouble) -> None:
    client, _ = chat
    double.configured["double"] = {"oriel.chat_template": ""}
    assert (await client.completions.create(model="chat", prompt="a")).choices
    with pytest.raises(openai.BadRequestError, match="no chat template: use /v1/completions"):
        await client.chat.completions.create(**asked())
    double.configured["double"] = {}
    with pytest.raises(openai.InternalServerError, match="is no language model, or is not loaded") as absent:
        await client.chat.completions.create(**asked())
    assert absent.value.status_code == 503


async def test_a_deadline_in_mid_stream_is_said_in_the_last_event(chat: Chat, double: LanguageDouble) -> None:
    client, stack = chat
    double.finish = "deadline"
    with pytest.raises(openai.InternalServerError, match="cut at its deadline") as late:
        await client.chat.completions.create(**asked())
    assert late.value.status_code == 504
    told = ""
    with pytest.raises(openai.APIError, match="cut at its deadline") as cut:
        async for chunk in await client.chat.completions.create(**asked(stream=True)):
            told += chunk.choices[0].delta.content or ""
    assert told == "hello" and isinstance(cut.value.body, dict) and cut.value.body["reason"] == "deadline_exceeded"
    labels = {"service": "chat.completions", "outcome": "deadline_exceeded"}
    assert stack.unit.metrics.registry.get_sample_value("oriel_logic_requests_total", labels) == 2


@pytest.mark.parametrize("hold_at", [0, 2])
async def test_comments_are_sent_while_a_token_is_awaited(
    chat: Chat, double: LanguageDouble, monkeypatch: pytest.MonkeyPatch, hold_at: int
) -> None:
    _, stack = chat
    monkeypatch.setattr(language, "KEEP_ALIVE_S", 0.02)
    double.hold_at = hold_at
    lines = []
    async with stack.client.stream("POST", "/v1/chat/completions", json=asked(stream=True)) as answer:
        assert answer.headers["x-accel-buffering"] == "no"
        async for line in answer.aiter_lines():
            lines.append(line)
            if line.startswith(":"):
                double.hold.set()
    said = [line for line in lines if line.startswith("data: {")]
    assert any(line.startswith(":") for line in lines) and len(said) == 7 and lines[-2] == "data: [DONE]"


async def test_a_token_for_which_nothing_waits_is_written_at_once(
    chat: Chat, double: LanguageDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stack = chat
    taps: list[Any] = []
    stream = BoundFakes.stream

    def noted(*given: Any, tap: Any, **more: Any) -> Any:
        taps.append(tap)
        return stream(*given, **more)

    monkeypatch.setattr(BoundFakes, "stream", noted)
    double.hold_at, double.says, texts = 2, lambda prompt: "he<llo", []
    async with stack.client.stream("POST", "/v1/chat/completions", json=asked(stream=True, tools=[WEATHER])) as answer:
        async for line in answer.aiter_lines():
            if '"content":"' not in line:
                continue
            texts.append(json.loads(line[6:])["choices"][0]["delta"]["content"])
            if texts[-1] == "e":
                assert taps[0]("ë".encode()) and taps[0](b"y")
                assert not taps[0](b"<") and not taps[0](b""), "it may begin a call of a tool"
                double.hold.set()
    assert texts == ["", "h", "e", "ë", "y", "<l", "l", "o"]
    assert not taps[0](b"late") and len(taps) == 1


async def test_a_token_that_comes_as_the_client_leaves_is_not_written(
    chat: Chat, double: LanguageDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, stack = chat
    taps: list[Any] = []
    written: list[bool] = []
    stream, on_lost = BoundFakes.stream, ServiceConnection.on_lost

    def noted(*given: Any, tap: Any, **more: Any) -> Any:
        taps.append(tap)
        return stream(*given, **more)

    def lost(connection: ServiceConnection) -> None:  # the transport is closed next, and then the task ends
        asyncio.get_running_loop().call_soon(lambda: written.append(taps[0](b"late")))
        on_lost(connection)

    monkeypatch.setattr(BoundFakes, "stream", noted)
    monkeypatch.setattr(ServiceConnection, "on_lost", lost)
    double.hold_at = 2
    chunks = await client.chat.completions.create(**asked(stream=True))
    await anext(chunks)
    await chunks.close()
    async with asyncio.timeout(30):
        await until(lambda: written)
    assert written == [False]


@pytest.mark.parametrize("hold_at", [0, 2])
async def test_a_client_that_leaves_ends_the_generation(
    chat: Chat, double: LanguageDouble, hold_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    client, stack = chat
    double.hold_at = hold_at
    if hold_at:
        stream = await client.chat.completions.create(**asked(stream=True))
        await anext(stream)
        await stream.close()
    else:
        waiting = asyncio.create_task(client.chat.completions.create(**asked(stream=True)))
        await until(lambda: bool(double.prompts))
        waiting.cancel()
    async with asyncio.timeout(30):
        await until(lambda: not stack.unit.envelope.in_flight)
    gc.collect()
    assert not [each for each in caplog.records if each.name == "asyncio"], "nobody has to look into it"


async def test_a_response_and_its_events(chat: Chat, double: LanguageDouble) -> None:
    client, _ = chat
    whole = await client.responses.create(model="chat", input="hello", instructions="be brief", store=False)
    assert double.prompts == ["<|begin|><|system|>be brief<|user|>hello<|answer|>"]
    assert (whole.output_text, whole.status, whole.model_dump()["store"]) == ("hello", "completed", False)
    assert whole.usage is not None and whole.usage.output_tokens == 5
    assert whole.usage.input_tokens_details.cached_tokens == len(double.prompts[0]) // 2
    stream = await client.responses.create(model="chat", input="hello", stream=True, max_output_tokens=3)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[4:] == [
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    async with client.responses.stream(model="chat", input="hello") as following:
        assert (await following.get_final_response()).output_text == "hello"


async def test_a_response_calls_tools_and_takes_their_results(chat: Chat, double: LanguageDouble) -> None:
    client, _ = chat
    tool: Any = {"type": "function", "strict": False, **WEATHER["function"]}
    double.says = lambda prompt: f"<tool_call>{CALL}</tool_call>"
    given: Any = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    async with client.responses.stream(model="chat", input=given, tools=[tool]) as events:
        first: Any = (await events.get_final_response()).output[0]
    assert (first.type, first.name, json.loads(first.arguments)) == ("function_call", "weather", {"city": "Paris"})
    result = {"type": "function_call_output", "call_id": first.call_id, "output": "sunny"}
    turns = [*given, first.model_dump(), result]
    await client.responses.create(model="chat", input=turns, tools=[tool], tool_choice="none")
    said = f"<tool_call>\n{CALL}\n</tool_call>"
    assert double.prompts[-1] == f"<|begin|><|user|>hello<|assistant|>{said}<|tool|>sunny<|answer|>"


@pytest.mark.parametrize(
    ("given", "param", "text"),
    [
        ({"previous_response_id": "r"}, "previous_response_id", "nothing is kept between calls"),
        ({"store": True}, "store", "nothing is kept between calls"),
        ({"conversation": "c"}, "conversation", "nothing is kept between calls"),
        ({"background": True}, "background", "on the connection"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]", "not text"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input", "role"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "type"),
    ],
)
async def test_a_response_that_needs_more_than_text_is_refused(
    chat: Chat, double: LanguageDouble, given: Any, param: str, text: str
) -> None:
    client, _ = chat
    with pytest.raises(openai.BadRequestError, match=text) as wrong:
        await client.responses.create(**{"model": "chat", "input": "hello", **given})
    assert str(wrong.value.param).startswith(param) and not double.prompts


async def test_a_template_that_never_ends_is_ended(
    chat: Chat, double: LanguageDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = chat
    monkeypatch.setattr("oriel_logic.openai.language.RENDER_S", 0.5)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    double.configured["double"] |= {"oriel.chat_template": loop}
    with pytest.raises(openai.InternalServerError, match="0.5 s"):
        await client.chat.completions.create(**asked())


async def test_trace_and_metrics_name_model_and_tokens(chat: Chat) -> None:
    client, stack = chat
    await client.chat.completions.create(**asked(stream=False))
    server, *_ = stack.sink.spans
    found = {name: value for name, value in server.attributes.items() if name.startswith("gen_ai.")}
    assert found["gen_ai.operation.name"] == "chat" and found["gen_ai.request.model"] == "chat"
    assert found["gen_ai.usage.output_tokens"] == 5 and found["gen_ai.provider.name"] == "oriel"
    assert found["gen_ai.usage.cache_read.input_tokens"] == found["gen_ai.usage.input_tokens"] // 2
    labels = {"gen_ai_operation_name": "chat", "gen_ai_request_model": "chat", "oriel_tier": ""}
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        metric = f"gen_ai_server_{name}_seconds_count"
        assert stack.unit.metrics.registry.get_sample_value(metric, labels) == 1


def test_an_event_is_one_line_of_json() -> None:
    answer = language.Answer(parse(json.dumps(asked()).encode(), ChatRequest), CALLED, "m")
    parts = [language.Delta(0, [Part("content", text)]) for text in ("a\nb\r\u2028", '"')]
    for each in b"".join(map(answer.events, parts)).split(b"\n\n")[1:-1]:
        assert b"\n" not in each and b"\r" not in each and each.startswith(b"data: ")
        assert msgspec.json.decode(each[6:])["choices"][0]["delta"]["content"]
