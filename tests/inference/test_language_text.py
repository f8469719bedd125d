"""The text of generated tokens: whole characters, and stop strings that lie across tokens."""

from hypothesis import given
from hypothesis import strategies as st

from oriel_inference.language.text import GeneratedText

BYTES = [bytes([byte]) for byte in range(256)]


def until_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The rule, character by character."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


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
