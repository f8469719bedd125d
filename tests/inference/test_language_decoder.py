"""The process of a language model: sequences, refusals, ends and restarts, with the double of an engine."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from oriel_inference.errors import LoadFailed
from oriel_inference.language.child import TOO_SLOW, _StepLoop
from oriel_inference.language.double import END, Double
from oriel_inference.language.engine import Guide, Options, Sampling
from oriel_inference.language.messages import Add, StepReport

from ..waiting import gone
from .language_process import decoding

LETTERS = Sampling(max_tokens=40)


async def test_text_is_encoded_and_its_answer_ends_with_a_reason(tmp_path: Path) -> None:
    async with decoding(tmp_path) as model:
        answer = await model.answer(1, "<|user|>hello<|answer|>", Sampling(max_tokens=40, logprobs=0))
        assert bytes(answer.ids[:-1]) == b"hello"
        assert answer.ids[-1] == END
        assert (answer.finish, answer.prompt_tokens, answer.prompt) == ("stop", 7, [259, *b"hello", 261])
        assert len(answer.logprobs) == len(answer.ids)
        cut = await model.answer(2, [259, *b"hello", 261], Sampling(max_tokens=3))
        assert (bytes(cut.ids), cut.finish, cut.prompt) == (b"hel", "length", [])


async def test_a_cancelled_sequence_goes_on_from_its_tokens_as_if_undisturbed(tmp_path: Path) -> None:
    async with decoding(tmp_path) as model:
        prompt = list(b"a prompt of more than two blocks, whose tokens are cached")
        whole = await model.answer(1, prompt, LETTERS)
        model.decoder.add(2, prompt, LETTERS)
        first = list(await model.tokens(2, 10))
        model.decoder.cancel(2)
        rest = await model.answer(3, prompt + first, Sampling(max_tokens=40 - len(first)))
        assert first + rest.ids == whole.ids
        assert rest.cached_tokens > len(prompt) - 16


async def test_long_prompts_are_computed_in_pieces_beside_running_sequences(tmp_path: Path) -> None:
    async with decoding(tmp_path, step_tokens=8) as model:
        model.decoder.add(1, b"x", Sampling(max_tokens=200))
        await model.tokens(1, 1)
        await model.answer(2, [7] * 60, Sampling(max_tokens=1))
        computed = [report.prompt_tokens for report in model.reports]
        assert max(computed) == 8 and sum(computed) == 61
        assert len(model.news[1].ids) >= 8


async def test_a_refused_prompt_disturbs_no_other_sequence(tmp_path: Path) -> None:
    async with decoding(tmp_path, settings={"oriel.double.context": "50"}) as model:
        model.decoder.add(1, "go on", LETTERS)
        refused = await model.answer(2, [1] * 50, LETTERS)
        assert refused.refused == "the prompt has 50 tokens, the model takes 50 with the answer"
        assert (await model.finished(1)).finish == "length"


async def test_a_killed_process_is_reported_and_started_again(tmp_path: Path) -> None:
    async with decoding(tmp_path) as model:
        model.decoder.add(1, "go on", Sampling(max_tokens=100_000))
        await model.tokens(1, 3)
        for deaths in (1, 2):
            pid = model.decoder.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while model.starts < deaths:
                await model.changed()
            assert model.ends == ["signal 9"] * deaths
        assert (await model.answer(1, "again", LETTERS)).finish == "length"
        pid = model.decoder.pid
    assert pid is not None and gone(pid)
    assert model.decoder.pid is None


async def test_a_guide_that_slows_all_tokens_down_ends_with_a_reason(tmp_path: Path) -> None:
    async with decoding(tmp_path, settings={"oriel.double.guide_ms": "50"}) as model:
        model.decoder.add(1, "go on", Sampling(max_tokens=60))
        model.decoder.add(2, "x", Sampling(max_tokens=60, guide=Guide("regex", "(a*)*")))
        assert (await model.finished(2)).refused == TOO_SLOW
        assert (await model.finished(1)).finish == "length"


async def test_a_process_whose_step_hangs_is_killed(tmp_path: Path) -> None:
    async with decoding(tmp_path, stall_s=0.2, settings={"oriel.double.step_ms": "600000"}) as model:
        model.decoder.add(1, "go on", LETTERS)
        while not model.ends:
            await model.changed()
        assert model.ends == ["it made no step within 0.2 s"]


async def test_a_process_that_hangs_is_killed_whatever_comes_and_goes(tmp_path: Path) -> None:
    async with decoding(tmp_path, stall_s=0.3, settings={"oriel.double.step_ms": "600000"}) as model:
        for number in range(100):
            if model.ends:
                break
            model.decoder.add(number, "go on", LETTERS)
            await asyncio.sleep(0.1)
            model.decoder.cancel(number)
        assert model.ends == ["it made no step within 0.3 s"]


async def test_a_process_without_work_after_a_cancel_is_left_alone(tmp_path: Path) -> None:
    async with decoding(tmp_path, stall_s=0.2) as model:
        model.decoder.add(1, "go on", LETTERS)
        model.decoder.cancel(1)
        await asyncio.sleep(0.5)
        assert model.ends == []


class _OneByOne(Double):
    """Begins guides as openvino-genai does: one at a time, each in a step that takes its time."""

    def step(self) -> None:
        new = [number for number, each in self._sequences.items() if each.sampling.guide and not each.made]
        held = {number: self._sequences.pop(number) for number in new[1:]}
        time.sleep(0.25 if new else 0.0)
        super().step()
        self._sequences.update(held)


class _Commands:
    """A connection whose server sends one command with the first step, the others with the fourth, and then leaves."""

    def __init__(self, *commands: Add) -> None:
        self._sent = [commands[:1], (), (), commands[1:]]
        self.reports: list[StepReport] = []

    def take(self, *, wait: bool) -> Sequence[Add]:
        if wait and not self._sent:
            raise ConnectionError
        return self._sent.pop(0) if self._sent else ()

    def send(self, report: StepReport) -> None:
        self.reports.append(report)


def test_guides_that_begin_one_after_another_do_not_count_as_slow() -> None:
    engine, guided = _OneByOne(), Sampling(max_tokens=3, guide=Guide("regex", "a"))
    engine.load("/dev/null", Options())
    commands = _Commands(Add(1, "go on", LETTERS), *(Add(number, "x", guided) for number in range(2, 8)))
    with pytest.raises(ConnectionError):
        _StepLoop(engine, commands, 256).run()  # type: ignore[arg-type]
    news = [each for report in commands.reports for each in report.progress]
    assert [each.refused for each in news if each.refused] == []
    assert sum(each.finish == "length" for each in news) == 7


async def test_a_file_that_cannot_be_read_is_refused_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="the file is damaged: copy it again"):
        async with decoding(tmp_path, content=b"bad!"):
            pass


async def test_a_misused_engine_ends_its_process_alone(tmp_path: Path) -> None:
    async with decoding(tmp_path) as model:
        model.decoder.add(1, [9999], LETTERS)
        while not model.ends:
            await model.changed()
        assert model.ends == ["exit code 1"]
