"""How much of what a model prints goes to the log."""

from hypothesis import given
from hypothesis import strategies as st

from oriel_inference.backends.python.output import MAX_BYTES, MAX_LINE_BYTES, MAX_LINES, Output


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
