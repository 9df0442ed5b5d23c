"""Text to ids and back."""

import json
import time
from pathlib import Path

import pytest
import tiktoken
from conftest import GPT2_RANKS, SHARED, make_text, needs_shared
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer

from gpt.errors import UserError, WorkError
from gpt.text import boundaries, tokenizer, tokenizer_files, tokenizer_json

HARD = [
    "", " ", "\n", "plain", "WE'LL SEE, I'm sure; THEY'VE", "1234567890123 12 3", "a\r\nb\r\n\r\n c", "tabs\t\tand  spaces   end ",
    "Zürich naïve 日本語 🐕‍🦺 עברית", "<|endoftext|>", "x <|endoftext|> y", " " * 300 + "z", "\n" * 50 + "a", "\u00a0\u2003\u3000b",
    "\x00\x01\x1c\x1f", "½ ² ٣ Ⅷ", "e\u0301\u0301", "\ufffd", "_under_score__", "''''s 'S 's",
]  # fmt: skip


@pytest.fixture(scope="module")
def learnt() -> tokenizer.Tokenizer:
    return tokenizer.learn_tokenizer([make_text()], 400)


@pytest.fixture(scope="module")
def hf_learnt(learnt: tokenizer.Tokenizer) -> HFTokenizer:
    return HFTokenizer.from_str(json.dumps(tokenizer_json.to_tokenizer_json(learnt)))


@pytest.mark.parametrize("text", HARD)
def test_round_trip_and_parity_on_hard_texts(text: str, learnt: tokenizer.Tokenizer, hf_learnt: HFTokenizer) -> None:
    for each in (learnt, tokenizer.bytes_tokenizer()):
        ids = each.encode(text)
        assert each.decode(ids.tolist()) == text
        assert each.eot not in ids
    if "<|endoftext|>" not in text:  # which the tokenizers library takes for the special token
        assert hf_learnt.encode(text).ids == learnt.encode(text).tolist()


@settings(max_examples=300)
@given(text=st.text(max_size=60))
def test_round_trip_and_parity_on_any_text(text: str, learnt: tokenizer.Tokenizer, hf_learnt: HFTokenizer) -> None:
    ids = learnt.encode(text).tolist()
    assert learnt.decode(ids) == text
    assert hf_learnt.encode(text).ids == ids


@needs_shared
def test_gpt2_is_tiktokens_and_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(GPT2_RANKS))
    ours = tokenizer.gpt2_tokenizer()
    assert (ours.vocab_size, ours.eot) == (50_257, 50_256)
    reference = tiktoken.get_encoding("r50k_base")
    theirs = HFTokenizer.from_str(json.dumps(tokenizer_json.to_tokenizer_json(ours)))
    for text in [*HARD, make_text(500), (SHARED / "data" / "tinyshakespeare.txt").read_text()[:100_000]]:
        assert ours.encode(text).tolist() == reference.encode_ordinary(text)
        if "<|endoftext|>" not in text:
            assert theirs.encode(text).ids == ours.encode(text).tolist()
    assert len(tokenizer_json.merges(ours.ranks)) == 50_000


def test_gpt2_offline_says_what_goes_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    monkeypatch.setenv("GPT_CACHE_DIR", str(tmp_path))

    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(tokenizer.tiktoken, "get_encoding", offline)
    with pytest.raises(WorkError, match="could not be fetched") as error:
        tokenizer.gpt2_tokenizer()
    assert "r50k_base.tiktoken" in error.value.hint
    assert str(tmp_path / "tiktoken" / "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4") in error.value.hint


def test_vocabulary_size_counts_end_of_text(learnt: tokenizer.Tokenizer) -> None:
    assert (learnt.vocab_size, learnt.eot) == (400, 399)
    assert (tokenizer.bytes_tokenizer().vocab_size, tokenizer.bytes_tokenizer().eot) == (257, 256)


def test_learning_is_deterministic(learnt: tokenizer.Tokenizer) -> None:
    again = tokenizer.learn_tokenizer([make_text()], 400)
    assert again.ranks == learnt.ranks
    assert again.fingerprint == learnt.fingerprint
    assert tokenizer.learn_tokenizer([make_text(seed=1)], 400).fingerprint != learnt.fingerprint


def test_vocabulary_larger_than_the_text_supports() -> None:
    with pytest.raises(UserError, match=r"supports a vocabulary of \d+ ids at most, not 5,000") as error:
        tokenizer_files.make_tokenizer("auto", 5000, ["a tiny text"], 11)
    size = int(error.value.hint.split()[2])
    assert tokenizer_files.make_tokenizer("auto", size, ["a tiny text"], 11).vocab_size == size
    assert tokenizer_files.make_tokenizer("auto", None, ["a tiny text"], 11).vocab_size == size
    with pytest.raises(UserError, match="at least 257"):
        tokenizer_files.make_tokenizer("auto", 256, ["a tiny text"], 11)


def test_ids_outside_the_vocabulary(learnt: tokenizer.Tokenizer) -> None:
    with pytest.raises(UserError, match="id 400 is outside the vocabulary of 400"):
        learnt.decode([1, 400])


@pytest.mark.parametrize("run", [" " * 1_000_000, "\n" * 1_000_000, "a" * 1_500_000, "^" * 1_500_000, "7" * 1_500_000])
def test_long_runs_neither_panic_nor_take_quadratic_time(run: str, learnt: tokenizer.Tokenizer) -> None:
    started = time.monotonic()
    for text in (run, run + "z", "z" + run + " z"):
        assert learnt.decode(learnt.encode(text).tolist()) == text
    assert tokenizer.learn_tokenizer_up_to([run + "z"], 300).vocab_size <= 300
    assert time.monotonic() - started < 30  # quadratic time would take hours


@pytest.fixture(scope="module")
def spacious() -> tokenizer.Tokenizer:
    """With tokens of many spaces and line ends, which a wrong cut would break up."""
    text = "".join(f"{space * length}x" for space in " \n" for length in range(1, 40)) * 3
    return tokenizer.learn_tokenizer_up_to([text], 600)


@settings(max_examples=50, deadline=None)
@given(
    before=st.text(max_size=5),
    space=st.sampled_from(" \n\t\r\u00a0\u3000"),
    length=st.integers(9_995, 10_010),
    after=st.sampled_from(["", "z", " z", "\n", "\nz", "9", "!", "\x1c"]),
)
def test_cuts_in_long_white_space_change_no_id(
    before: str, space: str, length: int, after: str, spacious: tokenizer.Tokenizer
) -> None:
    assert max(map(len, spacious.ranks)) > 8
    text = before + space * length + after
    assert spacious.encode(text).tolist() == spacious._encoding.encode_ordinary(text)


def test_no_token_is_learnt_that_would_take_long_to_take_apart() -> None:
    text = "=" * 200_000 + " " * 200_000 + "ab1½" * 50_000 + "é\u0301" * 50_000
    ruler = tokenizer.learn_tokenizer_up_to([text], 5000)
    assert max(len(token.decode("utf-8", "replace")) for token in ruler.ranks) <= tokenizer.LONGEST_LEARNT
    started = time.monotonic()
    tokenizer_json.to_tokenizer_json(ruler)
    assert time.monotonic() - started < 20  # a token of 100,000 bytes would take many minutes


def test_a_piece_over_the_limit_is_cut_and_counted(learnt: tokenizer.Tokenizer) -> None:
    assert learnt.encode_counted("a" * 2**20 + " " + "b" * (2**20 - 1))[1] == 0
    assert learnt.encode_counted("a" * (2**21 + 1))[1] == 2
    assert boundaries.cuts("a" * (2**21 + 1), learnt.pattern) == ([2**20, 2**21], 2)
