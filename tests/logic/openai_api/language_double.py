"""A language model as inference servers serve one: decoupled, with the tensors of Triton's vLLM back end.

It answers with the text between the last `<|answer|>` of its prompt and the control token before that, one character a
token, as the engine `double` of inference servers does.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from oriel_logic.client.models import Outputs
from oriel_logic.errors import ModelInputWrong
from oriel_logic.testing import FakeModels, spec

MODEL = "double"
CONTROL = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|answer|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|answer|>{% endif %}"
)
SPEC = spec(
    MODEL,
    inputs={
        "text_input": ("BYTES", [1]),
        "input_ids": ("INT64", [-1]),
        "stream": ("BOOL", [1]),
        "exclude_input_in_output": ("BOOL", [1]),
        "sampling_parameters": ("BYTES", [1]),
        "return_logprobs": ("BOOL", [1]),
    },
    outputs={"text_output": ("BYTES", [1]), "logprobs": ("BYTES", [1])},
)


class LanguageDouble(FakeModels):
    """Stands where a server has its inference servers.

    prompts, sampling: of each call. says: makes an answer of a prompt. finish: why each answer ends, "" for the true
    reason. hold: set while the model stops before the token `hold_at`. gone: set when a caller left in mid-answer.
    """

    def __init__(self, **parameters: str) -> None:
        self.prompts: list[str] = []
        self.sampling: list[dict[str, Any]] = []
        self.says: Callable[[str], str] = echoed
        self.finish = ""
        self.hold = asyncio.Event()
        self.hold_at = -1
        self.gone = asyncio.Event()
        self.context = 4096
        known = {
            "oriel.chat_template": TEMPLATE,
            "oriel.bos_token": CONTROL[0],
            "oriel.eos_token": CONTROL[1],
            "oriel.control_tokens": json.dumps(CONTROL),
            "oriel.context": "4096",
        }
        super().__init__({MODEL: self.answer}, specs=[SPEC], parameters={MODEL: known | parameters})

    async def start(self) -> None:
        """Do nothing: there is nothing to look up."""

    async def close(self) -> None:
        """Do nothing: there are no connections."""

    async def answer(
        self,
        sampling_parameters: Any,
        stream: Any,
        text_input: Any = None,
        input_ids: Any = None,
        exclude_input_in_output: Any = (False,),
        **_: Any,
    ) -> AsyncIterator[Outputs]:
        prompt = bytes(input_ids.tolist()).decode() if text_input is None else text_input[0].decode()
        sampling = json.loads(sampling_parameters[0])
        self.prompts.append(prompt)
        self.sampling.append(sampling)
        if len(prompt) >= self.context:
            raise ModelInputWrong(f"the prompt has {len(prompt)} tokens, the model takes {self.context}")
        shown = "" if stream[0] or exclude_input_in_output[0] else prompt
        return self._pieces(prompt, sampling, bool(stream[0]), shown)

    async def _pieces(self, prompt: str, sampling: dict[str, Any], streams: bool, shown: str) -> AsyncIterator[Outputs]:
        text = self.says(prompt)
        for stop in sampling.get("stop", ()):
            text = text.partition(stop)[0]
        most = sampling["max_tokens"]
        finish = self.finish or ("stop" if len(text) < most else "length")
        text = text[:most]
        facts = {"finish_reason": finish, "prompt_tokens": len(prompt), "completion_tokens": len(text)}
        facts |= {"cached_tokens": len(prompt) // 2, "paused": 0, "paused_ms": 0}
        try:
            for index, piece in enumerate([*text, ""] if streams else [shown + text]):
                if index == self.hold_at:
                    await self.hold.wait()
                last = not streams or index == len(text)
                yield outputs(piece, facts if last else {})
        except GeneratorExit:
            self.gone.set()
            raise


def outputs(text: str, facts: dict[str, Any]) -> Outputs:
    known = [{"id": ord(each), "logprob": -0.5, "bytes": list(each.encode())} for each in text]
    arrays = {
        name: np.array([value.encode()], object)
        for name, value in {"text_output": text, "logprobs": json.dumps(known)}.items()
    }
    return Outputs(arrays, model=MODEL, model_version="1", parameters=facts)


def echoed(prompt: str) -> str:
    parts = re.split("|".join(map(re.escape, CONTROL)), prompt)
    return parts[-2] if len(parts) > 1 else prompt
