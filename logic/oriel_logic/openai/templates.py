"""Makes one prompt of chat messages by the model's own Jinja template. Runs in worker processes.

The template comes from the model's folder and the messages from outside: it is rendered in jinja2's immutable sandbox,
by a worker that is killed past a time and a size, to a text of bounded length. Messages that contain a control token
are refused, so that nobody speaks in another's role.
"""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from oriel_logic.errors import ParameterWrong

MAX_TEMPLATES = 16
MAX_PROMPT = 8 << 20  # characters of a rendered prompt
_MARKS = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")  # marks for training, which jinja2 does not know
# For a model whose template has no place for tools.
_TOOLS = (
    "You can call these functions:\n<tools>\n{tools}\n</tools>\nTo call one, answer with <tool_call>\n"
    '{{"name": its name, "arguments": its arguments as a JSON object}}\n</tool_call>'
)


def render(
    known: Mapping[str, str],
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    more: Mapping[str, Any],
) -> str:
    """Render a conversation, up to where the assistant's answer begins.

    known: the parameters of the model's configuration. more: the caller's values for the template.
    Raises ParameterWrong for messages that have no prompt.
    """
    from jinja2.exceptions import TemplateError

    template = known["oriel.chat_template"]
    own = {f"{name}_token": known.get(f"oriel.{name}_token", "") for name in ("bos", "eos")}
    control: list[str] = json.loads(known.get("oriel.control_tokens") or "[]")
    given = json.dumps([messages, tools, more], ensure_ascii=False)
    used = next((each for each in control if json.dumps(each, ensure_ascii=False)[1:-1] in given), None)
    if used is not None:
        raise ParameterWrong(f"a message or tool contains the control token {used}: leave it out")
    if tools and "tools" not in template:
        text = _TOOLS.format(tools="\n".join([json.dumps(each, ensure_ascii=False) for each in tools]))
        first = f"{messages[0]['content']}\n\n" if messages[0]["role"] == "system" else ""
        messages = [{"role": "system", "content": first + text}, *messages[bool(first) :]]
    if "tool_calls" not in template:
        messages = [with_calls(each) if each.get("tool_calls") else each for each in messages]
    pieces: list[str] = []
    size = 0
    try:
        values = {**more, **own, "messages": messages, "tools": tools, "add_generation_prompt": True}
        for piece in compiled(template).generate(values):
            size += len(piece)
            if size > MAX_PROMPT:
                raise ParameterWrong(f"the prompt has more than {MAX_PROMPT} characters: send fewer messages")
            pieces.append(piece)
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise ParameterWrong(f"the model's chat template refuses these messages: {error}") from None
    return "".join(pieces)


def with_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Put the calls of tools that an assistant has made into the text of its message, as `_TOOLS` asks for them."""
    called = [json.dumps(each["function"], ensure_ascii=False) for each in message["tool_calls"]]
    text = "".join([f"<tool_call>\n{each}\n</tool_call>" for each in called])
    return {**message, "content": message["content"] + text}


@lru_cache(maxsize=MAX_TEMPLATES)
def compiled(template: str) -> Any:
    """Return the template in an environment like that of Hugging Face's transformers."""
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(_MARKS.sub("", template))
