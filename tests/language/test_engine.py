"""openvino-genai as an engine, on a tiny model: `make test SUITE=language`. Skipped where it is not installed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("openvino_genai")

from oriel_inference.language.engine import Facts, Guide, LanguageEngine, Options, PromptRefused, Sampling
from oriel_inference.language.openvino import OpenVinoGenAi

from .tiny_gguf import write_tiny

GREEDY = Sampling(max_tokens=24, temperature=0.0)
SCHEMA = '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'
GUIDED = Sampling(max_tokens=24, temperature=0.0, guide=Guide("json_schema", SCHEMA))
BAD = Sampling(guide=Guide("regex", "((("))


class Engine:
    """An engine and its facts. `run` steps until all that was added has ended."""

    def __init__(self, engine: LanguageEngine, facts: Facts) -> None:
        self.engine = engine
        self.facts = facts
        self.ids: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.logprobs: dict[int, list[float]] = {}

    def add(self, number: int, prompt: str | list[int], sampling: Sampling = GREEDY) -> int:
        """Begin a sequence; return how many tokens of its prompt are cached."""
        added = self.engine.add(number, prompt, sampling)
        self.ids[number], self.logprobs[number] = [], []
        self.ends.pop(number, None)
        return added.cached

    def step(self) -> None:
        self.engine.step()
        for number in self.ids.keys() - self.ends.keys():
            try:
                piece = self.engine.read(number)
            except PromptRefused as refused:
                self.ends[number] = refused.text
                continue
            self.ids[number] += piece.ids
            self.logprobs[number] += piece.logprobs
            if piece.finish:
                self.ends[number] = piece.finish

    def run(self) -> None:
        while self.ids.keys() - self.ends.keys():
            self.step()

    def text(self, number: int) -> bytes:
        return b"".join(self.facts.vocabulary[each] for each in self.ids[number])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    write_tiny(path)
    return path


@pytest.fixture
def tiny(file: Path) -> Iterator[Engine]:
    engine = OpenVinoGenAi()
    yield Engine(engine, engine.load(str(file), Options(cache_mb=1024)))


def test_the_facts_are_those_of_the_file(tiny: Engine) -> None:
    facts = tiny.facts
    assert (facts.context, facts.bos, facts.eos) == (256, "<s>", "</s>")
    assert facts.control_tokens == {"<s>": 0, "</s>": 1, "<|user|>": 2, "<|assistant|>": 3}
    assert facts.vocabulary[:5] == [b"", b"", b"", b"", b"\0"] and facts.vocabulary[-1] == b" the"
    assert facts.chat_template.startswith("{% for m in messages %}")
    assert facts.cache_tokens > 256


def test_a_text_is_cut_into_tokens_whose_bytes_are_the_text(tiny: Engine) -> None:
    text = "<|user|>in the wörld<|assistant|>"
    ids = list(tiny.engine.add(1, text, GREEDY).ids)
    assert b"".join(tiny.facts.vocabulary[each] for each in ids).decode() == "in the wörld"
    assert ids[0] == 2 and ids[-1] == 3


def test_a_cancelled_sequence_goes_on_from_cached_blocks(tiny: Engine) -> None:
    prompt = list(range(4, 104))
    assert tiny.add(1, prompt) == 0
    tiny.run()
    tiny.add(2, prompt)
    while len(tiny.ids[2]) < 8:
        tiny.step()
    tiny.engine.cancel(2)
    first = tiny.ids.pop(2)
    assert tiny.add(3, prompt + first, Sampling(max_tokens=24 - len(first), temperature=0.0)) >= 96
    tiny.run()
    assert first + tiny.ids[3] == tiny.ids[1]


def test_a_seed_gives_the_same_tokens_beside_other_sequences(tiny: Engine) -> None:
    seeded = Sampling(max_tokens=12, seed=3, logprobs=0, ignore_eos=True)
    tiny.add(1, "the", seeded)
    tiny.run()
    for number in (2, 3, 4):
        tiny.add(number, "the", seeded if number == 3 else Sampling(max_tokens=12, ignore_eos=True))
    tiny.run()
    assert tiny.ids[3] == tiny.ids[1] and len(tiny.logprobs[1]) == 12
    assert tiny.logprobs[2] == [] and tiny.ids[2] != tiny.ids[4]


def test_prompts_that_do_not_fit_are_refused_and_answers_end_at_the_context(tiny: Engine) -> None:
    for prompt in ("", [266], [-1], [5] * 256, "x" * 300, "x" * 100_000):
        with pytest.raises(PromptRefused):
            tiny.add(1, prompt)
    tiny.add(2, [5] * 250, Sampling(max_tokens=100, temperature=0.0, ignore_eos=True))
    tiny.run()
    assert (len(tiny.ids[2]), tiny.ends[2]) == (6, "length")


def test_a_guide_is_obeyed_and_a_broken_one_disturbs_nobody(tiny: Engine) -> None:
    tiny.add(1, "json:", GUIDED)
    tiny.add(2, "the")
    tiny.run()
    guided, free = tiny.ids[1], tiny.ids[2]
    assert tiny.text(1).lstrip().startswith(b"{")
    tiny.add(3, "json:", GUIDED)
    tiny.add(4, "the")
    tiny.step()
    tiny.step()
    tiny.add(5, "x", BAD)
    tiny.add(6, "x", Sampling(guide=Guide("regex", "yes|no")))
    tiny.run()
    assert tiny.ids[3] == guided and tiny.ids[4] == free
    assert tiny.ends[5].startswith("the guide cannot be used: Regex parsing error") and tiny.ids[5] == []
    assert tiny.text(6) in (b"yes", b"no")


def test_the_least_number_of_tokens_is_the_same_after_a_broken_guide(tiny: Engine) -> None:
    late = Sampling(max_tokens=60, min_tokens=20, temperature=0.0, stop_token_ids=tuple(range(256)))
    tiny.add(1, "the", late)
    tiny.run()
    tiny.add(2, "the", late)
    while len(tiny.ids[2]) < 10:
        tiny.step()
    tiny.add(3, "x", BAD)
    tiny.run()
    assert len(tiny.ids[2]) == len(tiny.ids[1]) < 30


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=30, guide=Guide("regex", "yes|no"), ignore_eos=True, min_tokens=30),
        Sampling(max_tokens=30, guide=Guide("regex", ""), ignore_eos=True),
        Sampling(guide=Guide("json_schema", "false")),
        Sampling(guide=Guide("json_schema", '{"type": "integer", "minimum": 9, "maximum": 3}')),
        Sampling(guide=Guide("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}')),
        Sampling(guide=Guide("grammar", 'root ::= root "a" | root root | ""')),
        Sampling(guide=Guide("structural_tag", "{}")),
        Sampling(guide=Guide("regex", "a\0b")),
        Sampling(temperature=1e-300, top_p=1e-30, repetition_penalty=0.01),
        Sampling(temperature=100.0, top_k=1 << 20, presence_penalty=-2.0, stop_token_ids=((1 << 31) - 1,)),
    ],
)
def test_hostile_parameters_end_their_own_call_at_most(tiny: Engine, sampling: Sampling) -> None:
    tiny.add(1, "the", Sampling(max_tokens=40, temperature=0.0, ignore_eos=True))
    tiny.add(2, "the", sampling)
    tiny.run()
    assert (len(tiny.ids[1]), tiny.ends[1]) == (40, "length")
