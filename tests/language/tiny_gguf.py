"""Writes a Llama of two layers with random weights as a GGUF file of 240 KB, with a tokenizer of bytes."""

import struct
from pathlib import Path

import numpy as np

WIDTH, HEADS, LAYERS, INNER = 64, 2, 2, 128
CONTROL = ("<s>", "</s>", "<|user|>", "<|assistant|>")
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
WORDS = ("th", "the", "he", "in", "\u0120t", "\u0120the")
MERGES = ["t h", "th e", "h e", "i n", "\u0120 t", "\u0120t he"]
_TEXT, _ARRAY, _U32, _F32, _I32 = 8, 9, 4, 6, 5
_NORMAL, _CONTROL = 1, 3


def write_tiny(path: Path, *, context: int = 256) -> None:
    """Write the model."""
    tokens = [*CONTROL, *_byte_letters(), *WORDS]
    values: list[tuple[str, int, object]] = [
        ("general.architecture", _TEXT, "llama"),
        ("general.name", _TEXT, "tiny"),
        ("general.file_type", _U32, 1),
        ("general.quantization_version", _U32, 2),
        ("llama.context_length", _U32, context),
        ("llama.embedding_length", _U32, WIDTH),
        ("llama.block_count", _U32, LAYERS),
        ("llama.feed_forward_length", _U32, INNER),
        ("llama.rope.dimension_count", _U32, WIDTH // HEADS),
        ("llama.rope.freq_base", _F32, 10000.0),
        ("llama.attention.head_count", _U32, HEADS),
        ("llama.attention.head_count_kv", _U32, HEADS),
        ("llama.attention.layer_norm_rms_epsilon", _F32, 1e-5),
        ("llama.vocab_size", _U32, len(tokens)),
        ("tokenizer.ggml.model", _TEXT, "gpt2"),
        ("tokenizer.ggml.pre", _TEXT, "default"),
        ("tokenizer.ggml.tokens", _TEXT, tokens),
        ("tokenizer.ggml.token_type", _I32, [_CONTROL if token in CONTROL else _NORMAL for token in tokens]),
        ("tokenizer.ggml.merges", _TEXT, MERGES),
        ("tokenizer.ggml.bos_token_id", _U32, 0),
        ("tokenizer.ggml.eos_token_id", _U32, 1),
        ("tokenizer.ggml.unknown_token_id", _U32, 0),
        ("tokenizer.ggml.padding_token_id", _U32, 1),
        ("tokenizer.chat_template", _TEXT, TEMPLATE),
    ]
    tensors = _tensors(len(tokens))
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(values)) + b"".join(map(_entry, values))
    at = 0
    for name, array in tensors.items():
        dims = array.shape[::-1]
        head += _text(name) + struct.pack(
            f"<I{len(dims)}QIQ", len(dims), *dims, 1 if array.dtype == np.float16 else 0, at
        )
        at += array.nbytes + -array.nbytes % 32
    head += bytes(-len(head) % 32)
    path.write_bytes(head + b"".join(a.tobytes() + bytes(-a.nbytes % 32) for a in tensors.values()))


def _byte_letters() -> list[str]:
    """Return the letter that byte-level BPE writes for each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


def _tensors(vocabulary: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)

    def weights(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) / columns**0.5).astype(np.float16)

    ones = np.ones(WIDTH, np.float32)
    found = {"token_embd.weight": weights(vocabulary, WIDTH)}
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        found |= {f"{block}.attn_{each}.weight": weights(WIDTH, WIDTH) for each in ("q", "k", "v", "output")}
        found |= {f"{block}.ffn_{each}.weight": weights(INNER, WIDTH) for each in ("gate", "up")}
        found |= {f"{block}.ffn_down.weight": weights(WIDTH, INNER)}
        found |= {f"{block}.{each}_norm.weight": ones for each in ("attn", "ffn")}
    return found | {"output_norm.weight": ones, "output.weight": 8 * weights(vocabulary, WIDTH)}


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _entry(entry: tuple[str, int, object]) -> bytes:
    key, kind, value = entry
    if not isinstance(value, list):
        return _text(key) + struct.pack("<I", kind) + _value(kind, value)
    return _text(key) + struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(_value(kind, each) for each in value)


def _value(kind: int, value: object) -> bytes:
    if kind == _TEXT:
        return _text(str(value))
    return struct.pack({_U32: "<I", _F32: "<f", _I32: "<i"}[kind], value)
