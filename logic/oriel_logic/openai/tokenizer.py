"""Tokenizes text. These functions run in worker processes; a tokenizer is read once per process, on its first use.

Needs the package `tokenizers` (extra `embeddings`) and the model's `tokenizer.json`.
"""

import os
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oriel_logic.errors import ParameterWrong

MAX_TOKENIZERS = 16
Ids = NDArray[np.int32]


def missing(path: Path) -> str:
    """Return why this tokenizer cannot be used here, "" if it can; nothing is imported."""
    if find_spec("tokenizers") is None:
        return "it needs the package tokenizers: pip install 'oriel-serving[embeddings]'"
    return "" if path.is_file() else f"there is no tokenizer file {path.name} beside its handler file"


def encode(path: str, inputs: Sequence[str] | Sequence[list[int]], longest: int) -> tuple[Ids, Ids]:
    """Tokenize texts, or check token ids, with the special tokens that the model needs around them.

    longest: bound on the tokens of a text, special ones included; longer ones are cut; 0 for no bound.
    Returns the ids of all texts, one after another, and the length of each. Raises ParameterWrong for an id that is no
    token.
    """
    tokenizer = loaded(path)
    if isinstance(inputs[0], str):
        rows = [each.ids for each in tokenizer.encode_batch(list(inputs))]
        before, after = affixes(path)
    else:
        size = tokenizer.get_vocab_size()
        wrong = next((token for row in inputs for token in row if not 0 <= int(token) < size), None)
        if wrong is not None:
            text = f"{wrong} is not a token of this model: its ids are 0 to {size - 1}"
            raise ParameterWrong(text, param="input")
        before, after = affixes(path)
        rows = [[*before, *row, *after] for row in inputs]
    if longest:
        keep = max(longest - len(after), 0)
        rows = [row if len(row) <= longest else [*row[:keep], *after] for row in rows]
    return np.fromiter((token for row in rows for token in row), np.int32), np.array(list(map(len, rows)), np.int32)


def loaded(path: str) -> Any:
    """Return the tokenizer of this file, read again if the file has changed. It neither cuts nor pads."""
    return read(path, os.stat(path).st_mtime_ns)


@lru_cache(maxsize=MAX_TOKENIZERS)
def read(path: str, changed_ns: int) -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # workers are the parallelism
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def affixes(path: str) -> tuple[list[int], list[int]]:
    """Return the special tokens before and after a text, such as [CLS] and [SEP]."""
    return around(path, os.stat(path).st_mtime_ns)


@lru_cache(maxsize=MAX_TOKENIZERS)
def around(path: str, changed_ns: int) -> tuple[list[int], list[int]]:
    tokenizer = read(path, changed_ns)
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return whole[:at], whole[at + len(bare) :]
    return [], []
