"""Streaming of whole characters, without any part of a stop string."""

from collections.abc import Sequence

from conftest import make_text
from hypothesis import example, given
from hypothesis import strategies as st

from gpt.decoding.stream import TextStream
from gpt.tokenizers import tokenizer
from gpt.tokenizers.tokenizer import Tokenizer

BYTES = tokenizer.bytes_tokenizer()


def stream_pieces(ids: Sequence[int], stops: Sequence[str] = (), tok: Tokenizer = BYTES) -> list[str]:
    stream = TextStream(tok, stops)
    pieces = []
    for id in ids:
        pieces.append(stream.push(id))
        if stream.stopped:
            break
    return [*pieces, stream.flush()]


@given(st.text(max_size=30), st.binary(max_size=6))
def test_streaming_shows_whole_characters_and_all_text(text: str, junk: bytes) -> None:
    for data in (text.encode(), text.encode() + junk):
        assert "".join(stream_pieces(list(data))) == data.decode("utf-8", "replace")
    stream = TextStream(BYTES)
    assert not any("\ufffd" in stream.push(byte) for byte in "é🐕\u4e2d".encode())


def test_replacement_character_in_the_text_is_streamed() -> None:
    tok = tokenizer.train_tokenizer([make_text()], 300)
    assert "".join(stream_pieces(tok.encode("a\ufffdb").tolist(), tok=tok)) == "a\ufffdb"


def text_before_stop(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the stop string that ends first. If several end there, removes the longest."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))]
    return text


LETTERS = st.text("ab🐕", min_size=1, max_size=4)


@given(st.text("ab🐕", max_size=20), st.lists(LETTERS, max_size=4))
@example("aab", ["ab"])
@example("abab🐕", ["aba🐕", "b🐕"])
@example("abc", ["abc", "bc", "c"])
def test_no_part_of_a_stop_string_is_shown(text: str, stops: list[str]) -> None:
    expected = text_before_stop(text, stops)
    pieces = stream_pieces(list(text.encode()), stops)
    assert "".join(pieces) == expected
    shown_text = ""
    for piece in pieces:  # Shown text is never retracted.
        shown_text += piece
        assert expected.startswith(shown_text)


@given(st.text("ab ", max_size=30), st.lists(st.text("ab ", min_size=1, max_size=5), max_size=3))
def test_stop_strings_match_across_tokens(text: str, stops: list[str]) -> None:
    tok = tokenizer.train_tokenizer(["ab aab abb bab aba " * 50], 264)
    assert "".join(stream_pieces(tok.encode(text).tolist(), stops, tok)) == text_before_stop(text, stops)


def test_only_possible_stop_strings_are_held_back() -> None:
    stream = TextStream(BYTES, ["\n\n", "END"])
    assert [stream.push(byte) for byte in b"a\nbEN."] == ["a", "", "\nb", "", "", "EN."]
    assert [stream.push(byte) for byte in b"E\n"] == ["", "E"]
    assert (stream.push(ord("\n")), stream.stopped, stream.flush()) == ("", True, "")
