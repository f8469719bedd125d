"""The text of generated tokens: whole characters, and stop strings that lie across tokens."""

from hypothesis import given
from hypothesis import strategies as st

from oriel_inference.language.text import GeneratedText

LETTERS = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4)
BYTES = [bytes([byte]) for byte in range(256)]


def until_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The rule, character by character."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(LETTERS, STOPS, st.data())
def test_stop_strings_are_found_however_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end].encode() for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    scanner, shown = GeneratedText(pieces, stops), ""
    for token in range(len(pieces)):
        shown += scanner.feed(token)
        assert until_stop(text, stops)[0].startswith(shown), "what was shown is never taken back"
    assert (shown + scanner.flush(), scanner.stopped) == until_stop(text, stops)


@given(LETTERS, STOPS)
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    scanner = GeneratedText([text.encode()], stops)
    shown = scanner.feed(0)
    held = text[len(shown) :]
    assert scanner.stopped or held == "" or any(stop.startswith(held) for stop in stops)


@given(st.lists(st.binary(max_size=3), max_size=30))
def test_bytes_of_tokens_come_out_as_whole_characters(pieces: list[bytes]) -> None:
    text = GeneratedText(pieces)
    shown = "".join(text.feed(token) for token in range(len(pieces)))
    assert shown + text.flush() == b"".join(pieces).decode("utf-8", "replace")


@given(st.text("aé€😀", max_size=20), st.lists(st.text("aé€😀", min_size=1, max_size=3), max_size=3))
def test_a_character_over_several_tokens_is_never_shown_in_part(whole: str, stops: list[str]) -> None:
    text, shown = GeneratedText(BYTES, stops), ""
    for byte in whole.encode():
        shown += text.feed(byte)
        assert until_stop(whole, stops)[0].startswith(shown)
    assert (shown + text.flush(), text.stopped) == until_stop(whole, stops)


def test_a_stop_string_counts_only_after_the_least_number_of_tokens() -> None:
    text = GeneratedText(BYTES, ["b"], least=2)
    assert [text.feed(token) for token in b"abab"] == ["a", "b", "a", ""] and text.stopped


def test_control_tokens_and_ids_outside_the_vocabulary_have_no_text() -> None:
    text = GeneratedText([b"a", b""])
    assert [text.feed(token) for token in (0, 1, 2, -1)] == ["a", "", "", ""]
