"""The tokenizer in a GGUF file, without llama.cpp (tests/exporting/test_llama_cpp.py has it)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import vocabularies
from conftest import make_text
from gguf import GGUFWriter, TokenType
from tokenizers import models, pre_tokenizers

from gpt.errors import UserError
from gpt.exporting import gguf_tokenizer
from gpt.text.backends import ByteBPE
from gpt.text.boundaries import GPT2_PATTERN, LLAMA3_PATTERN, MINBPE_PATTERN, OLD_GPT2_PATTERN
from gpt.text.tokenizer import Tokenizer, bytes_tokenizer, learn_tokenizer
from gpt.text.tokenizer_files import find_tokenizer

LEARNT = learn_tokenizer([make_text()], 500, ["<|user|>"])
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"


def written(tokenizer: Tokenizer, vocab_size: int | None = None) -> dict[str, Any]:
    """What a file says of a tokenizer, without the beginning `tokenizer.ggml.` of most keys."""
    gguf_tokenizer.check(tokenizer)
    writer = GGUFWriter(None, "gpt2")
    gguf_tokenizer.add(writer, tokenizer, vocab_size or tokenizer.vocab_size)
    return {key.removeprefix("tokenizer.ggml."): value.value for key, value in writer.kv_data[0].items()}


def with_pattern(pattern: str, tokenizer: Tokenizer = LEARNT) -> Tokenizer:
    assert isinstance(tokenizer.backend, ByteBPE)
    return replace(tokenizer, backend=replace(tokenizer.backend, pattern=pattern))


def test_the_merges_in_the_file_give_our_ids() -> None:
    said = written(LEARNT)
    vocab = {token: id for id, token in enumerate(said["tokens"])}
    theirs = tokenizers.Tokenizer(models.BPE(vocab, [tuple(pair.split(" ")) for pair in said["merges"]]))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = make_text(500, seed=2)
    assert theirs.encode(text).ids == LEARNT.encode(text).tolist()


def test_a_file_says_of_each_id_what_it_is() -> None:
    said = written(replace(LEARNT, words={"<think>": 503}), 506)
    types = [TokenType(each) for each in said["token_type"]]
    assert types == [TokenType.NORMAL] * 498 + [TokenType.CONTROL] * 2 + [
        TokenType.UNUSED, TokenType.UNUSED, TokenType.UNUSED, TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.UNUSED
    ]  # fmt: skip
    assert said["tokens"][498:] == [
        "<|endoftext|>", "<|user|>", "[unused500]", "[unused501]", "[unused502]", "<think>", "[unused504]", "[unused505]"
    ]  # fmt: skip
    assert said["tokens"][:34][-2:] == ["Ġ", "!"]
    assert (said["model"], said["pre"]) == ("gpt2", "gpt-2")
    assert said["eos_token_id"] == said["bos_token_id"] == said["padding_token_id"] == 498
    assert (said["add_bos_token"], said["add_eos_token"], said["add_space_prefix"]) == (False, False, False)
    assert "eot_token_id" not in said and "tokenizer.chat_template" not in said


def test_plain_bytes_have_a_merge_that_never_happens() -> None:
    said = written(bytes_tokenizer())
    (pair,) = said["merges"]
    assert not set(pair.split(" ")) & set(said["tokens"])
    assert len(said["tokens"]) == len(set(said["tokens"])) == 257


def test_no_two_ids_have_one_text() -> None:
    said = written(replace(LEARNT, specials={"<|user|>": 499, "[unused501]": 503}), 505)
    assert said["tokens"][500:] == ["[unused500]", "[unused501]_", "[unused502]", "[unused501]", "[unused504]"]


@pytest.mark.parametrize(
    "pattern, name",
    [
        (GPT2_PATTERN, "gpt-2"),
        (OLD_GPT2_PATTERN, "gpt-2"),
        (LLAMA3_PATTERN, "llama-bpe"),
        (MINBPE_PATTERN.replace(r"]?\p{L}", r"]?+\p{L}").replace("]+[", "]++["), "llama-bpe"),
        (MINBPE_PATTERN.replace("{1,3}", ""), "qwen2"),
    ],
)
def test_the_pattern_has_its_name_there(pattern: str, name: str) -> None:
    assert written(with_pattern(pattern))["pre"] == name


@pytest.mark.parametrize("pattern", [MINBPE_PATTERN.replace("{1,3}", "{1,2}"), O200K, r"\S+|\s+"])
def test_a_pattern_that_llama_cpp_does_not_have_is_refused(pattern: str) -> None:
    with pytest.raises(UserError, match="does not support this tokenizer's pattern"):
        gguf_tokenizer.check(with_pattern(pattern))


def test_cl100k_with_a_token_that_reaches_beyond_a_line_end_is_refused() -> None:
    tokenizer = with_pattern(CL100K, bytes_tokenizer())
    assert written(tokenizer)["pre"] == "llama-bpe"
    assert isinstance(tokenizer.backend, ByteBPE)
    backend = replace(tokenizer.backend, ranks={**tokenizer.backend.ranks, b"\n ": 257})
    with pytest.raises(UserError, match="does not support this tokenizer's pattern"):
        gguf_tokenizer.check(replace(tokenizer, backend=backend))


@pytest.mark.parametrize(
    "form, name", [("gpt2", "gpt-2"), ("llama3", "llama-bpe"), ("qwen", "qwen2"), ("smollm2", "smollm")]
)
def test_the_forms_of_other_families(form: str, name: str, tmp_path: Path) -> None:
    tokenizer = find_tokenizer(str(vocabularies.write(form, tmp_path / form)))
    said = written(tokenizer)
    assert said["pre"] == name
    assert said["eos_token_id"] == tokenizer.eot
    assert said["add_bos_token"] == (form == "llama3")
    assert said["bos_token_id"] == (tokenizer.eot if tokenizer.bos is None else tokenizer.bos)
    assert said.get("tokenizer.chat_template") == tokenizer.chat_template
    notes = gguf_tokenizer.differences(tokenizer)
    assert [note for note in notes if "also stops at" not in note and "NFC" not in note] == []
    assert any("NFC" in note for note in notes) == (form == "qwen")
    more = {"llama3": "<|end_of_text|>", "qwen": "<|endoftext|>", "smollm2": "<|im_end|>"}.get(form)
    assert [note for note in notes if "also stops at" in note] == (
        [f"llama.cpp also stops at {more}, regardless of the file"] if more else []
    )


@pytest.mark.parametrize("form", ["llama2", "mistral", "unigram"])
def test_no_byte_level_bpe_is_refused(form: str, tmp_path: Path) -> None:
    tokenizer = find_tokenizer(str(vocabularies.write(form, tmp_path / form)))
    assert gguf_tokenizer.differences(tokenizer) == []
    with pytest.raises(UserError, match="needs a byte-level BPE") as raised:
        gguf_tokenizer.check(tokenizer)
    assert "folder" in str(raised.value.hint)


def test_tokens_that_no_merge_makes_need_a_pattern_under_which_they_are_found() -> None:
    assert isinstance(LEARNT.backend, ByteBPE)
    ranks = {**LEARNT.backend.ranks, b"qzqz": 500}
    tokenizer = replace(LEARNT, backend=replace(LEARNT.backend, ranks=ranks))
    with pytest.raises(UserError, match="no merge produces"):
        gguf_tokenizer.check(tokenizer)
    gguf_tokenizer.check(with_pattern(LLAMA3_PATTERN, tokenizer))


def test_a_special_token_that_is_a_part_of_words_too_is_refused() -> None:
    with pytest.raises(UserError, match='"the" is also an ordinary token'):
        gguf_tokenizer.check(replace(LEARNT, specials={"the": 499}))


def test_a_text_ends_where_ours_does() -> None:
    specials = {"<|im_end|>": 499, "<a>": 500, "<b>": 501, "<c>": 502}
    tokenizer = replace(LEARNT, specials=specials, more_ends=frozenset({499, 500, 501}))
    said = written(tokenizer)
    assert [said[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id")] == [498, 500, 501]
    assert gguf_tokenizer.differences(tokenizer) == []
    with pytest.raises(UserError, match="would not stop at all 5 end-of-text tokens"):
        gguf_tokenizer.check(replace(tokenizer, more_ends=frozenset({499, 500, 501, 502})))
    assert "stops at <|im_end|>" in gguf_tokenizer.differences(replace(tokenizer, more_ends=frozenset()))[0]
