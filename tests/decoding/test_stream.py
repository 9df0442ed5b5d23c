"""Ids → text as they come: whole characters, and nothing of a stop text."""

from collections.abc import Sequence

from conftest import make_text
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpt.decoding.stream import TextStream
from gpt.text import tokenizer
from gpt.text.tokenizer import Tokenizer

BYTES = tokenizer.bytes_tokenizer()
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a shared machine may stand still


def streamed(ids: Sequence[int], stops: Sequence[str] = (), tok: Tokenizer = BYTES) -> list[str]:
    """The pieces that are shown, up to a stop."""
    stream = TextStream(tok, stops)
    pieces = []
    for id in ids:
        pieces.append(stream.push(id))
        if stream.stopped:
            break
    return [*pieces, stream.flush()]


@PATIENT
@given(st.text(max_size=30), st.binary(max_size=6))
def test_streaming_shows_whole_characters_and_loses_nothing(text: str, junk: bytes) -> None:
    for data in (text.encode(), text.encode() + junk):
        assert "".join(streamed(list(data))) == data.decode("utf-8", "replace")
    stream = TextStream(BYTES)
    assert not any("\ufffd" in stream.push(byte) for byte in "é🐕\u4e2d".encode())


def test_a_literal_replacement_character_streams() -> None:
    tok = tokenizer.learn_tokenizer([make_text()], 300)
    assert "".join(streamed(tok.encode("a\ufffdb").tolist(), tok=tok)) == "a\ufffdb"


def up_to_a_stop(text: str, stops: Sequence[str]) -> str:
    """A letter at a time: as soon as a stop text stands at the end, what is before the longest such is the text."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


LETTERS = st.text("ab🐕", min_size=1, max_size=4)


@PATIENT
@given(st.text("ab🐕", max_size=20), st.lists(LETTERS, max_size=4))
@example("aab", ["ab"])
@example("abab🐕", ["aba🐕", "b🐕"])
@example("abc", ["abc", "bc", "c"])
def test_nothing_of_a_stop_text_is_shown(text: str, stops: list[str]) -> None:
    expected = up_to_a_stop(text, stops)
    pieces = streamed(list(text.encode()), stops)
    assert "".join(pieces) == expected
    shown = ""
    for piece in pieces:  # what has been shown is never taken back
        shown += piece
        assert expected.startswith(shown)


@PATIENT
@given(st.text("ab ", max_size=30), st.lists(st.text("ab ", min_size=1, max_size=5), max_size=3))
def test_stop_texts_do_not_see_where_tokens_end(text: str, stops: list[str]) -> None:
    tok = tokenizer.learn_tokenizer(["ab aab abb bab aba " * 50], 264)
    assert "".join(streamed(tok.encode(text).tolist(), stops, tok)) == up_to_a_stop(text, stops)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    stream = TextStream(BYTES, ["\n\n", "END"])
    assert [stream.push(byte) for byte in b"a\nbEN."] == ["a", "", "\nb", "", "", "EN."]
    assert [stream.push(byte) for byte in b"E\n"] == ["", "E"]
    assert (stream.push(ord("\n")), stream.stopped, stream.flush()) == ("", True, "")
