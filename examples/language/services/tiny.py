"""`/v1/completions` and `/v1/chat/completions` with the model that ../make.py writes.

Its weights are random: what it says means nothing.
"""

from oriel_logic.openai import LanguageModel

tiny = LanguageModel(
    model="tiny",
    tokenizer="tiny/tokenizer.json",
    ends=["<|endoftext|>", "<|im_end|>"],
    max_context=256,
)
