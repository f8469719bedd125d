"""How much of what a model prints goes to the log."""

import logging
import os
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_wire.process.output import MAX_BYTES, MAX_LINE_BYTES, MAX_LINES, LogLimit, Output, OutputPipe

from ..waiting import until


def test_a_second_has_its_share_and_the_rest_is_counted() -> None:
    output = Output()
    assert output.received(b"a\n\nb\nun", 0.0) == ["a", "b"] and not output.full
    assert len(output.received(b"x\n" * 5000, 0.5)) == MAX_LINES - 3 and output.full
    assert output.received(b"x\n" * 100 + b"half", 0.9) == []
    assert output.received(b" a line\n", 1.5) == [f"{5100 - MAX_LINES + 3} lines left out", "half a line"]


@given(st.lists(st.binary(max_size=9000).map(lambda data: data.replace(b"\0", b"\n")), max_size=40))
def test_no_second_has_more_than_its_share(pieces: list[bytes]) -> None:
    output = Output()
    found = [line for piece in pieces for line in output.received(piece, 0.0)] + output.flushed(0.0, end=True)
    assert len(found) <= MAX_LINES + 1
    assert sum(map(len, found)) <= MAX_BYTES + MAX_LINE_BYTES + 100


def test_what_is_logged_has_its_share_and_errors_have_their_own() -> None:
    said = LogLimit()
    taken = [said.allows(logging.INFO, "a line", 0.0) for _ in range(1000)]
    assert taken == [True] * MAX_LINES + [False] * (1000 - MAX_LINES)
    assert not said.allows(logging.WARNING, "two\nlines", 0.5) and said.allows(logging.ERROR, "heard", 0.5)
    assert said.counted() == [(logging.INFO, f"{1000 - MAX_LINES + 2} lines left out")] and not said.left_out
    assert said.allows(logging.INFO, "a line", 1.0) and said.counted() == []


@given(st.lists(st.tuples(st.integers(0, 60), st.text(max_size=9000)), max_size=60))
def test_every_line_is_said_or_counted(messages: list[tuple[int, str]]) -> None:
    said, total, taken = LogLimit(), 0, 0
    for level, text in messages:
        lines = text.count("\n") + 1
        total += lines
        taken += lines if said.allows(level, text, 0.0) else 0
    assert total == taken + sum(int(text.split()[0]) for _, text in said.counted())


async def test_a_megabyte_that_was_printed_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took sixteen turns of the loop, with a timer each: 50 MB that a service prints cost 250 ms of everybody."""
    there, here = os.pipe()
    lines, reads, read = list[str](), count(), os.read
    pipe = OutputPipe(there, lines.append)
    os.set_blocking(here, False)
    assert os.write(here, b"x\n" * (1 << 19)) == 1 << 20

    def counted(descriptor: int, size: int) -> bytes:
        if descriptor == there:
            next(reads)
        return read(descriptor, size)

    monkeypatch.setattr(os, "read", counted)
    await until(lambda: len(lines) == MAX_LINES)
    assert next(reads) == 1
    pipe.close()
    os.close(here)
    assert lines[-1] == f"{(1 << 19) - MAX_LINES} lines left out"
