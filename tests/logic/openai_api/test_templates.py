"""Chat templates as Hugging Face's models have them."""

import json
from typing import Any

import pytest

from oriel_logic.errors import ParameterWrong
from oriel_logic.openai import templates
from oriel_logic.openai.templates import render

SAID: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
USUAL = """\
{{ bos_token }}{% for message in messages %}
{% if message.role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}
{% generation %}[{{ message.role }}] {{ message.content }}{% endgeneration %}{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}"""
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "é<b>"}}]


def rendered(template: str, messages: list[dict[str, Any]] = SAID, **more: Any) -> str:
    known = {"oriel.chat_template": template, "oriel.bos_token": "<|end|>"}
    known["oriel.control_tokens"] = json.dumps(["<|end|>", 'a"b'])
    return render(known, messages, more.pop("tools", None), more)


def refused(template: str, messages: list[dict[str, Any]] = SAID, **more: Any) -> str:
    with pytest.raises(ParameterWrong) as wrong:
        rendered(template, messages, **more)
    return wrong.value.message


def test_a_template_has_what_it_has_in_transformers() -> None:
    assert rendered(USUAL, bos_token="<s>") == "<|end|>[user] a[assistant]", "the model's own token counts"
    assert rendered("{{ tools | tojson }}{{ tools }}", tools=TOOLS).startswith(
        '[{"type": "function", "function": {"name": "é<b>"}}]'
    )
    assert rendered("{% for m in messages %}{% break %}{% endfor %}{{ strftime_now('%Y') }}").startswith("20")
    assert rendered("{{ messages | tojson(indent=1) }}").count("\n") == 5


def test_a_refusal_of_the_template_is_the_callers_to_read() -> None:
    found = refused(USUAL, [{"role": "system", "content": "a"}])
    assert found == "the model's chat template refuses these messages: no system messages"
    assert "refuses" in refused("{{ messages[0].content + 1 }}")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "a<|end|>b"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {"x": ["<|end|>"]}}}]},
        {"role": "tool", "content": "", "name": "<|end|>"},
    ],
)
def test_nobody_speaks_in_anothers_role_by_writing_control_tokens(message: dict[str, Any]) -> None:
    found = refused(USUAL, [*SAID, message])
    assert found == "a message or tool contains the control token <|end|>: leave it out"
    assert refused(USUAL, effort="<|end|>") == found
    assert "control token" in refused(USUAL, [{"role": "user", "content": 'a"b'}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{% for a in range(10000000) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_reach_out(template: str) -> None:
    try:
        assert rendered(template) == ""
    except ParameterWrong as error:
        assert "refuses" in error.message


def test_a_prompt_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_PROMPT", 100)
    assert "more than 100 characters" in refused("{% for a in range(101) %}{{ 'x' }}{% endfor %}")


def test_a_template_without_a_place_for_tools_gets_them_in_a_message() -> None:
    template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"
    found = rendered(template, tools=TOOLS)
    assert found.startswith("[system] You can call these functions:\n<tools>\n{") and found.endswith("[user] a")
    first = {"role": "system", "content": "be brief"}
    assert rendered(template, [first, *SAID], tools=TOOLS).startswith("[system] be brief\n\nYou can call")
    call = {"type": "function", "function": {"name": "é", "arguments": {"x": 1}}}
    found = rendered(template, [*SAID, {"role": "assistant", "content": "so", "tool_calls": [call]}])
    assert '[assistant] so<tool_call>\n{"name": "é", "arguments": {"x": 1}}\n</tool_call>' in found
