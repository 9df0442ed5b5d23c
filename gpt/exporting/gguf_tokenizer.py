"""Exporting a byte-level BPE tokenizer in a GGUF file for llama.cpp.

llama.cpp gives the same ids as `gpt`, except in three rare cases (tests/exporting/test_llama_cpp.py). llama.cpp doesn't
recognize the 4,382 letters and digits that are new in Unicode 16. With the patterns of Llama 3 and Qwen, llama.cpp
doesn't split off 's if the s is U+017F. If added words overlap, llama.cpp finds the longest first; `gpt` finds the
leftmost.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpt.chat.chat import special_words
from gpt.exporting.byte_bpe import BPE, added_words, require_bpe
from gpt.system.errors import UserError
from gpt.tokenizers.backends import to_gpt2_spelling
from gpt.tokenizers.boundaries import (
    CL100K_PATTERN,
    DIGITS_PATTERN,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    MINBPE_PATTERN,
    OLD_GPT2_PATTERN,
    remove_possessive,
)
from gpt.tokenizers.gguf_vocabulary import END_KEYS, end_ids
from gpt.tokenizers.saving import format_merges, merging_pairs
from gpt.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter, TokenType

HINT = "export a folder instead: -o without .gguf"

# llama.cpp's name for each pattern (src/llama-vocab.cpp). o200k is missing, because llama.cpp's version of that pattern
# splits 1 in 20 texts differently.
_PATTERN_NAMES = {
    remove_possessive(GPT2_PATTERN): "gpt-2",
    OLD_GPT2_PATTERN: "gpt-2",
    remove_possessive(DIGITS_PATTERN): "smollm",
    CL100K_PATTERN: "llama-bpe",
    LLAMA3_PATTERN: "llama-bpe",
    MINBPE_PATTERN: "llama-bpe",  # Minbpe's pattern splits like Llama 3's.
    **{p.replace("{1,3}", ""): "qwen2" for p in (LLAMA3_PATTERN, MINBPE_PATTERN)},
}
# The only name with which llama.cpp works like tiktoken: a piece that is a token skips the merges.
_TIKTOKEN = "llama-bpe"


def check(tokenizer: Tokenizer) -> None:
    """Raises `UserError` for a tokenizer whose ids or end-of-text tokens llama.cpp cannot reproduce."""
    bpe = require_bpe(tokenizer, "a .gguf file", HINT)
    name = _pattern_name(bpe)
    if name is None:
        raise UserError("llama.cpp does not support this tokenizer's pattern for splitting text into words", HINT)
    if bpe.skips_merges != (name == _TIKTOKEN) and len(merging_pairs(bpe.ranks)) < sum(len(t) > 1 for t in bpe.ranks):
        raise UserError("this tokenizer has tokens that no merge produces: llama.cpp would give other ids", HINT)
    words = sorted({*map(to_gpt2_spelling, bpe.ranks)} & {*added_words(tokenizer)})
    if words:
        raise UserError(f'"{words[0]}" is also an ordinary token: llama.cpp finds special tokens by their text', HINT)
    if not tokenizer.ends <= _ends(tokenizer)[1].keys():
        raise UserError(f"llama.cpp would not stop at all {len(tokenizer.ends)} end-of-text tokens", HINT)


def describe_differences(tokenizer: Tokenizer) -> list[str]:
    """Describes differences in llama.cpp that don't prevent an export. Published Qwen files differ from their
    tokenizers in the same ways."""
    notes, bpe = [], require_bpe(tokenizer, "a .gguf file", HINT)
    if bpe.nfc:
        notes.append("llama.cpp does not normalize text to NFC, as this tokenizer does: give it NFC text")
    if missing := sum(bytes([byte]) not in bpe.ranks for byte in range(256)):
        notes.append(f"this tokenizer has no token for {missing} of the 256 bytes: llama.cpp drops them")
    if ends := [word for id, word in _ends(tokenizer)[1].items() if id not in tokenizer.ends]:
        notes.append(f"llama.cpp also stops at {', '.join(ends)}, regardless of the file")
    return notes


def add(writer: "GGUFWriter", tokenizer: Tokenizer, vocab_size: int) -> None:
    """Adds a tokenizer to a GGUF file: texts and types of ``vocab_size`` ids, merges in order, the pattern's name, and
    the ids that start and end a text. Call `check` first."""
    bpe = require_bpe(tokenizer, "a .gguf file", HINT)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pattern_name(bpe) or "")
    tokens = list(_token_texts(tokenizer, vocab_size))
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    # llama.cpp requires at least one merge. This pair never merges, because neither side is a token.
    writer.add_token_merges(bpe.merges or format_merges([(b"\0\0", b"\0\0")]))
    bos = added_words(tokenizer).get(special_words(tokenizer).get("bos_token", ""), tokenizer.eot)
    writer.add_bos_token_id(bos if tokenizer.bos is None else tokenizer.bos)
    writer.add_pad_token_id(tokenizer.eot)
    writer.add_add_bos_token(tokenizer.bos is not None)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    for key, id in _ends(tokenizer)[0].items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", id)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _pattern_name(bpe: BPE) -> str | None:
    pattern = remove_possessive(bpe.pattern)
    # At the end of a text, Llama 3's pattern splits white space after the last newline, and cl100k's does not. Both
    # give the same ids if no token spans the split.
    spanning_tokens = (token for token in bpe.ranks if re.search(rb"[\r\n]", token) and token[-1:] not in b"\r\n")
    return None if pattern == CL100K_PATTERN and any(spanning_tokens) else _PATTERN_NAMES.get(pattern)


def _ends(tokenizer: Tokenizer) -> tuple[dict[str, int], dict[int, str]]:
    """Returns the end ids to write by key, and the ids at which llama.cpp then stops with their texts. The first is the
    ``eos_token`` of the chat template; the others are ends that llama.cpp doesn't know by name."""
    bpe, added = require_bpe(tokenizer, "a .gguf file", HINT), added_words(tokenizer)
    words = {**{to_gpt2_spelling(token): id for token, id in bpe.ranks.items()}, **added}
    eos = added.get(special_words(tokenizer)["eos_token"])
    first = eos if eos in tokenizer.ends else tokenizer.eot
    others = sorted(tokenizer.ends - {*end_ids(words, {"eos": first})})
    keys = dict(zip(END_KEYS, [first, *others], strict=False))
    texts = {id: word for word, id in words.items()}
    return keys, {id: texts[id] for id in end_ids(words, keys)}


def _token_texts(tokenizer: Tokenizer, vocab_size: int) -> Iterator[tuple[str, "TokenType"]]:
    """Yields the text and type of each id. llama.cpp requires distinct texts."""
    from gguf import TokenType

    bpe = require_bpe(tokenizer, "a .gguf file", HINT)
    entries = {id: (to_gpt2_spelling(token), TokenType.NORMAL) for token, id in bpe.ranks.items()}
    entries |= {id: (word, TokenType.CONTROL) for word, id in tokenizer.all_specials.items()}
    entries |= {id: (word, TokenType.USER_DEFINED) for word, id in tokenizer.words.items()}
    used_texts = {text for text, _ in entries.values()}
    for id in range(vocab_size):
        name = f"[unused{id}]"
        while name in used_texts:
            name += "_"
        yield entries.get(id, (name, TokenType.UNUSED))
