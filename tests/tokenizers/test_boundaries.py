"""Splitting long texts without changing their ids."""

import time
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import tiktoken_ext.openai_public as openai
from conftest import make_text, more, slow
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.system.errors import UserError
from gpt.tokenizers import backends, boundaries
from gpt.tokenizers.backends import ByteBPE
from gpt.tokenizers.boundaries import DIGITS_PATTERN, GPT2_PATTERN
from gpt.tokenizers.tokenizer import Tokenizer, train_tokenizer

BYTES = {bytes([byte]): byte for byte in range(256)}


def tiktoken_pattern(name: str) -> str:
    """Returns a tiktoken pattern without downloading the ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai, "load_tiktoken_bpe", lambda *_, **__: BYTES)
        return str(openai.ENCODING_CONSTRUCTORS[name]()["pat_str"])


PATTERNS = {
    "gpt2": GPT2_PATTERN,
    "cl100k": tiktoken_pattern("cl100k_base"),
    "o200k": tiktoken_pattern("o200k_base"),
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "minbpe": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "smollm2": DIGITS_PATTERN,
    "trailing spaces": r"\S+\s*|\s+",
    "single digits": r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "lines": r"[^\n]*\n|[^\n]+",
    "looks behind": r"(?<=x)y+|\w+|\W",
}
MOSTLY_SLOW = [name if name in ("gpt2", "o200k") else slow(name) for name in PATTERNS]
SPLITTABLE = ["gpt2", "cl100k", "o200k", "llama3", "qwen", "minbpe", "smollm2"]


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """Returns ranks of tokens that span spaces, line ends, punctuation, digits and combining marks."""
    runs = "".join(
        f"{space * length}x"
        for space in (" ", "\n", "\t ", " \n", "./", "!\n", "12", "か。")
        for length in range(1, 20)
    )
    return train_tokenizer([make_text(), (runs + "e\u0301\u0301 it's WE'LL 'll o'\n/\n") * 3], 700).backend.ranks


# Tokens of every run length make any split visible.
RUN_TOKENS = {run * n: 0 for run in (b" ", b"\n", b"\t", b"a", b"7", b"!", b"e\xcc\x81") for n in range(2, 90)}
RUN_RANKS = {token: rank for rank, token in enumerate([*BYTES, *RUN_TOKENS])}


@pytest.fixture(scope="module")
def tokenizers(ranks: dict[bytes, int]) -> Callable[[str], list[Tokenizer]]:
    """Returns a function that makes the tokenizers with a pattern, once."""
    return cache(lambda pattern: [Tokenizer("test", ByteBPE(pattern, each), len(each)) for each in (ranks, BYTES)])


HARD = st.text(
    st.sampled_from(" \n\r\t'/slLtdrevEm19.!-_aBx中か。\u0301é\u00a0\u3000\u2028½\x1cЖ’\u200b\u0130ſ"), max_size=40
)
TEXTS = st.one_of(
    HARD, st.text(max_size=30), st.lists(st.sampled_from([" ", "\n", "a", "!", "1", "'s", "\r\n", "/"])).map("".join)
)


@settings(max_examples=100)
@given(texts=st.lists(TEXTS, min_size=1, max_size=12), size=st.integers(1, 40))
@pytest.mark.parametrize("name", MOSTLY_SLOW)
def test_splitting_does_not_change_the_ids(
    name: str, texts: list[str], size: int, tokenizers: Callable[[str], list[Tokenizer]]
) -> None:
    parts = [part for part, _ in boundaries.parts(texts, PATTERNS[name], size)]
    assert "".join(parts) == "".join(texts)
    assert all(parts)
    for tokenizer in tokenizers(PATTERNS[name]):
        ids = [id for part in parts for id in tokenizer.encode(part).tolist()]
        assert ids == tokenizer.encode("".join(texts)).tolist()


@pytest.mark.parametrize("name", SPLITTABLE)
def test_parts_of_ordinary_text_have_about_the_requested_length(name: str) -> None:
    text = make_text(6000)
    parts = list(boundaries.parts([text[i : i + 500] for i in range(0, len(text), 500)], PATTERNS[name], 2000))
    assert "".join(part for part, _ in parts) == text
    assert not any(ends_inside_piece for _, ends_inside_piece in parts)
    assert len(parts) > len(text) / 4000


@pytest.mark.parametrize("name", sorted(set(PATTERNS) - set(SPLITTABLE)))
def test_unknown_pattern_is_never_split(name: str) -> None:
    text = (make_text(3000) + " " * 50_000 + "x") * 2
    assert list(boundaries.parts([text[:1000], text[1000:]], PATTERNS[name], 500)) == [(text, False)]


@pytest.mark.parametrize(
    ("limit", "pattern"),
    [("MAX_UNCUT", PATTERNS["lines"]), ("MAX_UNCUT_LIBRARY", "")],
    ids=["unknown form", "the tokenizers library"],
)
def test_unsplittable_document_is_bounded(limit: str, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundaries, limit, 1000)
    assert list(boundaries.parts(["7" * 10] * 100, pattern, 100)) == [("7" * 1000, False)]
    with pytest.raises(
        UserError, match="has 1,010 characters that the tokenizer's pattern leaves no place to split"
    ) as error:
        list(boundaries.parts(["7" * 10] * 200, pattern, 100))
    assert "--split-on" in error.value.hint


@pytest.mark.parametrize("name", SPLITTABLE)
def test_long_runs_are_split_anywhere_and_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundaries, "MAX_PART", 64)
    monkeypatch.setattr(boundaries, "SEARCH_BLOCK", 16)
    for run in (" ", "\n", "a", "7", "!"):
        parts = list(boundaries.parts([f"one word {run * 200}", " end"], PATTERNS[name], 16))
        assert "".join(part for part, _ in parts) == f"one word {run * 200} end"
        assert sum(anywhere for _, anywhere in parts) == 3
        assert max(len(part) for part, _ in parts) <= 64 + 16


@pytest.mark.parametrize("name", [slow("gpt2"), more("cl100k"), more("o200k")])
def test_long_runs_take_linear_time_and_constant_stack(name: str) -> None:
    byte_tokenizer = Tokenizer("test", ByteBPE(PATTERNS[name], BYTES), 256)
    merging_tokenizer = Tokenizer("test", ByteBPE(PATTERNS[name], RUN_RANKS), len(RUN_RANKS))
    start_time = time.process_time()
    runs = [run * 1_100_000 for run in (" ", "\n", "\t \n ", "a", "^", "7")]
    for text in [*(f"!{run}" for run in runs[:3]), *(f"\n{run}  9" for run in runs)]:
        assert byte_tokenizer.encode(text).astype(np.uint8).tobytes() == text.encode()
    assert len(merging_tokenizer.encode("a" * 1_100_000)) < 20_000
    assert time.process_time() - start_time < 30  # Quadratic time would take hours.


def test_engine_failure_is_an_error() -> None:
    tokenizer = Tokenizer("test", ByteBPE(r"(?:a|b)+(?!c)|[\s\S]", BYTES), 256)
    with pytest.raises(UserError, match="fails on a text of 3,000,001 characters"):
        tokenizer.encode("a" * 3_000_000 + "c")

    class PanicException(BaseException):  # Rust panics have this name.
        pass

    class Encoding:
        def encode_to_numpy(self, text: str, **_: object) -> None:
            raise PanicException("called `Result::unwrap()` on an `Err` value")

    tokenizer.backend.__dict__["_encoding"] = Encoding()
    with pytest.raises(UserError, match="fails on a text of 3 characters"):
        tokenizer.encode("abc")


@settings(max_examples=60)
@given(texts=st.lists(TEXTS | st.sampled_from([backends._SEPARATOR, backends._SEPARATOR[:-1]]), max_size=6))
def test_batch_encoding_equals_single_encoding(texts: list[str], tokenizers: Callable[[str], list[Tokenizer]]) -> None:
    for name in ("gpt2", "cl100k", "lines"):
        bpe = tokenizers(PATTERNS[name])[0]
        assert [ids.tolist() for ids in bpe.encode_all(texts)] == [bpe.encode(text).tolist() for text in texts]
