"""Converts the tokenizer in a GGUF file's metadata to a ``tokenizer.json``.

Names and defaults follow llama.cpp (src/llama-vocab.cpp).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpt.config import MAX_VOCAB_SIZE
from gpt.errors import UserError
from gpt.text.backends import BYTE_LEVEL, added_token
from gpt.text.boundaries import LLAMA3_PATTERN

HINT = "use the model's Transformers folder instead"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # Token types of llama.cpp.
MAX_PIECE = 512  # Maximum characters of a SentencePiece token. Every possible split of a token is tried.
_CASED = r"\p{Lm}\p{Lo}\p{M}"
_TEKKEN_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASED}]*[\p{{Ll}}{_CASED}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASED}]+[\p{{Ll}}{_CASED}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2, _DIGITS, _QWEN2_PATTERN = "GPT-2's pattern", "digits, then GPT-2's pattern", LLAMA3_PATTERN.replace("{1,3}", "")
_PATTERNS = {  # How text is split into words, by llama.cpp's names.
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), LLAMA3_PATTERN),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN2_PATTERN),
    "tekken": _TEKKEN_PATTERN,
}
# Here a word that is a token needs no merges, and a BOS token begins a text unless the file says otherwise.
_LIKE_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")


@dataclass(frozen=True)
class Vocabulary:
    """The contents of a tokenizer's files in Transformers."""

    tokenizer: dict[str, Any]  # Contents of tokenizer.json.
    config: dict[str, Any]  # Contents of tokenizer_config.json.
    ends: list[int]  # End-of-text ids.
    chat_template: str | None


def has_vocabulary(metadata: Mapping[str, Any]) -> bool:
    """Whether a file contains a tokenizer."""
    return "tokenizer.ggml.model" in metadata


def read_vocabulary(metadata: Mapping[str, Any], where: str) -> Vocabulary:
    """Returns the tokenizer of a GGUF file. Raises `UserError` if it is of an unknown kind or damaged."""
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama"):
        raise UserError(f"{where} has a tokenizer of type {kind!r:.40}; gpt reads gpt2 and llama", HINT)
    if not isinstance(tokens, list) or not 0 < len(tokens) <= MAX_VOCAB_SIZE or len(set(tokens)) < len(tokens):
        raise UserError(f"{where} is damaged: its list of tokens is missing, or a token is there twice", HINT)
    types = [int(each) for each in metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))]
    if len(types) != len(tokens):
        raise UserError(f"{where} is damaged: it has {len(tokens):,} tokens and {len(types):,} types", HINT)
    adds_bos = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _LIKE_LLAMA3
    bos = _id(metadata, "bos", tokens) if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else None
    values = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            added_token(id, word, type_ != _USER_DEFINED)
            for id, (word, type_) in enumerate(zip(tokens, types, strict=True))
            if type_ in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ],
        "post_processor": None if bos is None else _template(tokens[bos], bos),
        **(_byte_level if kind == "gpt2" else _sentence_pieces)(metadata, tokens, types, where),
    }
    ends = [id for name in ("eos", "eot", "eom") if (id := _id(metadata, name, tokens)) is not None]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **({} if bos is None else {"bos_token": tokens[bos]}),
        **({"eos_token": tokens[ends[0]]} if ends else {}),
    }
    template = metadata.get("tokenizer.chat_template")
    return Vocabulary(values, config, ends, template if isinstance(template, str) else None)


def _id(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    """Returns the id of a special token such as bos or eos, or None."""
    id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return id if type(id) is int and 0 <= id < len(tokens) else None


def _template(word: str, id: int) -> dict[str, Any]:
    """Returns a post-processor that puts a token before a text."""
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": word, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {word: {"id": word, "ids": [id], "tokens": [word]}},
    }


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str) -> dict[str, Any]:
    """Returns the parts of a ``tokenizer.json`` for a byte-level BPE."""
    name, merges = metadata.get("tokenizer.ggml.pre"), metadata.get("tokenizer.ggml.merges")
    if not isinstance(name, str) or name not in _PATTERNS:
        raise UserError(f"{where} splits text into words like {name!r:.40}, which gpt does not know", HINT)
    if not isinstance(merges, list):
        raise UserError(f"{where} is damaged: its tokenizer has no merges", HINT)
    pattern = _PATTERNS[name]
    has_own_pattern = pattern in (_GPT2, _DIGITS)
    steps: list[dict[str, Any]] = [BYTE_LEVEL | {"use_regex": has_own_pattern}]
    if pattern == _DIGITS:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    elif not has_own_pattern:
        steps.insert(0, {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})
    vocab = {word: id for id, word in enumerate(tokens) if types[id] != _UNUSED}
    # llama.cpp needs a merge, so a file without merges has one of tokens that don't exist.
    merges = [merge for merge in merges if merge.split(" ", 1)[0] in vocab]
    return {
        # Qwen's own tokenizers normalize text; llama.cpp does not.
        "normalizer": {"type": "NFC"} if name in ("qwen2", "deepseek-r1-qwen") else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0],
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": name in _LIKE_LLAMA3, "vocab": vocab, "merges": merges,
        },
    }  # fmt: skip


def _sentence_pieces(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> dict[str, Any]:
    """Returns the parts of a ``tokenizer.json`` for a SentencePiece BPE. Tokens with higher scores are merged first."""
    scores = [float(each) for each in metadata.get("tokenizer.ggml.scores", [])]
    if len(scores) != len(tokens) or not all(map(math.isfinite, scores)):
        raise UserError(f"{where} is damaged: its tokens have no scores", HINT)
    vocab = {word: id for id, word in enumerate(tokens) if types[id] != _UNUSED}
    pieces = {word: id for word, id in vocab.items() if types[id] == _NORMAL}
    longest = max(map(len, pieces), default=0)
    if longest > MAX_PIECE:
        raise UserError(f"{where} has a token of {longest:,} characters; {MAX_PIECE} are supported", HINT)
    merges = [
        (-scores[id], id, -at, f"{word[:at]} {word[at:]}")
        for word, id in pieces.items()
        for at in range(1, len(word))
        if word[:at] in pieces and word[at:] in pieces
    ]
    unknown = next((word for id, word in enumerate(tokens) if types[id] == _UNKNOWN), None)
    space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [{"type": "Prepend", "prepend": "\u2581"}] if space else []
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    restored = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if space else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, replaced]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [restored, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": _BYTE in types, "ignore_merges": False,
            "vocab": vocab, "merges": [merge for *_, merge in sorted(merges)],
        },
    }  # fmt: skip
