"""Tokenizers in GGUF files, without llama.cpp. tests/exporting/test_llama_cpp.py uses llama.cpp."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import vocabularies
from conftest import make_text
from gguf import GGUFWriter, TokenType
from tokenizers import models, pre_tokenizers

from gpt.exporting import gguf_tokenizer
from gpt.system.errors import UserError
from gpt.tokenizers.backends import ByteBPE
from gpt.tokenizers.boundaries import GPT2_PATTERN, LLAMA3_PATTERN, MINBPE_PATTERN, OLD_GPT2_PATTERN
from gpt.tokenizers.finding import find_tokenizer
from gpt.tokenizers.tokenizer import Tokenizer, bytes_tokenizer, train_tokenizer

TRAINED = train_tokenizer([make_text()], 500, ["<|user|>"])
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"


def metadata(tokenizer: Tokenizer, vocab_size: int | None = None) -> dict[str, Any]:
    """Returns a tokenizer's GGUF metadata, without the prefix `tokenizer.ggml.`."""
    gguf_tokenizer.check(tokenizer)
    writer = GGUFWriter(None, "gpt2")
    gguf_tokenizer.add(writer, tokenizer, vocab_size or tokenizer.vocab_size)
    return {key.removeprefix("tokenizer.ggml."): value.value for key, value in writer.kv_data[0].items()}


def with_pattern(pattern: str, tokenizer: Tokenizer = TRAINED) -> Tokenizer:
    assert isinstance(tokenizer.backend, ByteBPE)
    return replace(tokenizer, backend=replace(tokenizer.backend, pattern=pattern))


def test_exported_merges_give_the_same_ids() -> None:
    fields = metadata(TRAINED)
    vocab = {token: id for id, token in enumerate(fields["tokens"])}
    theirs = tokenizers.Tokenizer(models.BPE(vocab, [tuple(pair.split(" ")) for pair in fields["merges"]]))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = make_text(500, seed=2)
    assert theirs.encode(text).ids == TRAINED.encode(text).tolist()


def test_every_id_has_a_token_type() -> None:
    fields = metadata(replace(TRAINED, words={"<think>": 503}), 506)
    types = [TokenType(each) for each in fields["token_type"]]
    assert types == [TokenType.NORMAL] * 498 + [TokenType.CONTROL] * 2 + [
        TokenType.UNUSED, TokenType.UNUSED, TokenType.UNUSED, TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.UNUSED
    ]  # fmt: skip
    assert fields["tokens"][498:] == [
        "<|endoftext|>", "<|user|>", "[unused500]", "[unused501]", "[unused502]", "<think>", "[unused504]", "[unused505]"
    ]  # fmt: skip
    assert fields["tokens"][:34][-2:] == ["Ġ", "!"]
    assert (fields["model"], fields["pre"]) == ("gpt2", "gpt-2")
    assert fields["eos_token_id"] == fields["bos_token_id"] == fields["padding_token_id"] == 498
    assert (fields["add_bos_token"], fields["add_eos_token"], fields["add_space_prefix"]) == (False, False, False)
    assert "eot_token_id" not in fields and "tokenizer.chat_template" not in fields


def test_bytes_tokenizer_gets_an_unused_merge() -> None:
    fields = metadata(bytes_tokenizer())
    (pair,) = fields["merges"]
    assert not set(pair.split(" ")) & set(fields["tokens"])
    assert len(fields["tokens"]) == len(set(fields["tokens"])) == 257


def test_token_texts_are_unique() -> None:
    fields = metadata(replace(TRAINED, specials={"<|user|>": 499, "[unused501]": 503}), 505)
    assert fields["tokens"][500:] == ["[unused500]", "[unused501]_", "[unused502]", "[unused501]", "[unused504]"]


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
def test_patterns_get_llama_cpp_names(pattern: str, name: str) -> None:
    assert metadata(with_pattern(pattern))["pre"] == name


@pytest.mark.parametrize("pattern", [MINBPE_PATTERN.replace("{1,3}", "{1,2}"), O200K, r"\S+|\s+"])
def test_unsupported_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(UserError, match="does not support this tokenizer's pattern"):
        gguf_tokenizer.check(with_pattern(pattern))


def test_cl100k_with_a_token_across_line_ends_is_refused() -> None:
    tokenizer = with_pattern(CL100K, bytes_tokenizer())
    assert metadata(tokenizer)["pre"] == "llama-bpe"
    assert isinstance(tokenizer.backend, ByteBPE)
    backend = replace(tokenizer.backend, ranks={**tokenizer.backend.ranks, b"\n ": 257})
    with pytest.raises(UserError, match="does not support this tokenizer's pattern"):
        gguf_tokenizer.check(replace(tokenizer, backend=backend))


@pytest.mark.parametrize(
    "form, name", [("gpt2", "gpt-2"), ("llama3", "llama-bpe"), ("qwen", "qwen2"), ("smollm2", "smollm")]
)
def test_tokenizers_of_other_families_are_exported(form: str, name: str, tmp_path: Path) -> None:
    tokenizer = find_tokenizer(str(vocabularies.write(form, tmp_path / form)))
    fields = metadata(tokenizer)
    assert fields["pre"] == name
    assert fields["eos_token_id"] == tokenizer.eot
    assert fields["add_bos_token"] == (form == "llama3")
    assert fields["bos_token_id"] == (tokenizer.eot if tokenizer.bos is None else tokenizer.bos)
    assert fields.get("tokenizer.chat_template") == tokenizer.chat_template
    notes = gguf_tokenizer.describe_differences(tokenizer)
    assert [note for note in notes if "also stops at" not in note and "NFC" not in note] == []
    assert any("NFC" in note for note in notes) == (form == "qwen")
    extra_end = {"llama3": "<|end_of_text|>", "qwen": "<|endoftext|>", "smollm2": "<|im_end|>"}.get(form)
    assert [note for note in notes if "also stops at" in note] == (
        [f"llama.cpp also stops at {extra_end}, regardless of the file"] if extra_end else []
    )


@pytest.mark.parametrize("form", ["llama2", "mistral", "unigram"])
def test_tokenizers_other_than_byte_level_bpe_are_refused(form: str, tmp_path: Path) -> None:
    tokenizer = find_tokenizer(str(vocabularies.write(form, tmp_path / form)))
    with pytest.raises(UserError, match="needs a byte-level BPE") as raised:
        gguf_tokenizer.check(tokenizer)
    assert "folder" in str(raised.value.hint)


def test_tokens_without_a_merge_need_a_llama3_pattern() -> None:
    assert isinstance(TRAINED.backend, ByteBPE)
    ranks = {**TRAINED.backend.ranks, b"qzqz": 500}
    tokenizer = replace(TRAINED, backend=replace(TRAINED.backend, ranks=ranks))
    with pytest.raises(UserError, match="no merge produces"):
        gguf_tokenizer.check(tokenizer)
    gguf_tokenizer.check(with_pattern(LLAMA3_PATTERN, tokenizer))


def test_a_special_token_that_is_an_ordinary_token_is_refused() -> None:
    with pytest.raises(UserError, match='"the" is also an ordinary token'):
        gguf_tokenizer.check(replace(TRAINED, specials={"the": 499}))


def test_end_of_text_tokens_are_exported() -> None:
    specials = {"<|im_end|>": 499, "<a>": 500, "<b>": 501, "<c>": 502}
    tokenizer = replace(TRAINED, specials=specials, more_ends=frozenset({499, 500, 501}))
    fields = metadata(tokenizer)
    assert [fields[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id")] == [498, 500, 501]
    assert gguf_tokenizer.describe_differences(tokenizer) == []
    with pytest.raises(UserError, match="would not stop at all 5 end-of-text tokens"):
        gguf_tokenizer.check(replace(tokenizer, more_ends=frozenset({499, 500, 501, 502})))
    assert "stops at <|im_end|>" in gguf_tokenizer.describe_differences(replace(tokenizer, more_ends=frozenset()))[0]
