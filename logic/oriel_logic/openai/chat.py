"""Makes one prompt of chat messages. Runs in worker processes, with the tokenizer.

A model without its own template gets ChatML: `<|im_start|>role`, the text, `<|im_end|>`. Messages are tokenized as
plain text, so that no control token in them can change the role. A Jinja template (package `jinja2`, in its sandbox)
makes one text of everything; messages that contain a control token are refused then.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from oriel_logic.openai.tokenizer import Encoded, loaded

CHATML = "chatml"
START, END = "<|im_start|>", "<|im_end|>"
MAX_TEMPLATES = 16


def missing(template: str) -> str:
    """Return why this template cannot be used here, "" if it can."""
    if template in ("", CHATML):
        return ""
    if find_spec("jinja2") is None:
        return "its chat template needs the package jinja2: pip install 'oriel-serving[embeddings]'"
    file = Path(template)
    if not file.is_file():
        return f"there is no chat template {file.name} beside its handler file"
    from jinja2.exceptions import TemplateSyntaxError

    try:
        compiled(template, file.stat().st_mtime_ns)
    except TemplateSyntaxError as error:
        return f"its chat template {file.name} is wrong in line {error.lineno}: {error.message}"
    except (UnicodeDecodeError, OSError) as error:
        return f"its chat template {file.name} cannot be read: {error}"
    return ""


def encode_chat(path: str, template: str, start: str, messages: Sequence[Mapping[str, str]]) -> Encoded:
    """Tokenize a conversation, up to where the assistant's answer begins.

    template: "chatml", or the path of a Jinja template.
    start: the template's `bos_token`.
    messages: each with "role" and "content".
    """
    tokenizer = loaded(path)
    if template == CHATML:
        return single(chatml(tokenizer, messages))
    control = [each.content for each in tokenizer.get_added_tokens_decoder().values() if each.special]
    for message in messages:
        used = next((each for each in control if each in message["content"]), None)
        if used is not None:
            return single([], problem=f"a message contains the control token {used}: leave it out")
    try:
        text = rendered(template, start, messages)
    except ValueError as error:
        return single([], problem=str(error))
    return single(tokenizer.encode(text, add_special_tokens=False).ids)


def single(ids: Sequence[int], problem: str = "") -> Encoded:
    return Encoded(ids=np.array(ids, np.int32), lengths=np.array([len(ids)], np.int32), problem=problem)


def chatml(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    start, end = tokenizer.token_to_id(START), tokenizer.token_to_id(END)
    if start is None or end is None:
        raise ValueError(f"the tokenizer has no {START} and {END}: give the model's own template, chat_template=")

    def plain(text: str) -> list[int]:
        tokenizer.encode_special_tokens = True
        try:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        finally:
            tokenizer.encode_special_tokens = False
        return ids

    ids: list[int] = []
    for message in messages:
        ids += [start, *plain(f"{message['role']}\n{message['content']}"), end, *plain("\n")]
    return [*ids, start, *plain("assistant\n")]


def rendered(template: str, start: str, messages: Sequence[Mapping[str, str]]) -> str:
    """Render the template. Raises ValueError with the template's error for messages that it refuses."""
    from jinja2.exceptions import TemplateError

    ready = compiled(template, Path(template).stat().st_mtime_ns)  # an error of the template is not the caller's fault
    try:
        text: str = ready.render(
            messages=[dict(each) for each in messages], add_generation_prompt=True, bos_token=start
        )
    except TemplateError as error:
        raise ValueError(f"the model's chat template refuses these messages: {error}") from error
    return text


@lru_cache(maxsize=MAX_TEMPLATES)
def compiled(template: str, changed_ns: int) -> Any:
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(Path(template).read_text())
