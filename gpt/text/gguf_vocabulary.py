"""Converts the tokenizer in a GGUF file's metadata to a ``tokenizer.json``.

Names and defaults follow llama.cpp (src/llama-vocab.cpp).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpt.config import MAX_VOCAB_SIZE
from gpt.errors import UserError
from gpt.text.boundaries import LLAMA3_PATTERN

HINT = "use the model's Transformers folder instead"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # Token types of llama.cpp.
MAX_PIECE = 512  # Maximum characters of a SentencePiece token. Every possible split of a token is tried.
_LEVEL: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_CASED = r"\p{Lm}\p{Lo}\p{M}"
_TEKKEN_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASED}]*[\p{{Ll}}{_CASED}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_CASED}]+[\p{{Ll}}{_CASED}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2, _DIGITS, _LLAMA3, _QWEN2, _TEKKEN = "gpt2", "digits", "llama3", "qwen2", "tekken"
_PRE = {  # Pre-tokenizers by llama.cpp's names.
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _QWEN2),
    "tekken": _TEKKEN,
}
# Pre-tokenizers that put a BOS token before a text unless the file says otherwise.
_ADDS_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
_IGNORES_MERGES = (_LLAMA3, _TEKKEN)  # A word that is a token needs no merges.


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
    starts = {"gpt2": metadata.get("tokenizer.ggml.pre") in _ADDS_BOS, "llama": True}[kind]
    bos = _id(metadata, "bos", tokens) if metadata.get("tokenizer.ggml.add_bos_token", starts) else None
    values = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": id, "content": word, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": type_ != _USER_DEFINED,
            }
            for id, (word, type_) in enumerate(zip(tokens, types, strict=True))
            if type_ in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ],
        "post_processor": None if bos is None else _template(tokens[bos], bos),
        **(_byte_level if kind == "gpt2" else _sentence_pieces)(metadata, tokens, types, where),
    }  # fmt: skip
    ends = [id for name in ("eos", "eot", "eom") if (id := _id(metadata, name, tokens)) is not None]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{
            f"{name}_token": tokens[id]
            for name, id in (("bos", bos), ("eos", ends[0] if ends else None))
            if id is not None
        },
    }
    template = metadata.get("tokenizer.chat_template")
    return Vocabulary(values, config, ends, template if isinstance(template, str) else None)


def _id(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    """Returns the id of a special token such as bos or eos, or None."""
    key = {"unk": "unknown", "pad": "padding"}.get(name, name)
    id = metadata.get(f"tokenizer.ggml.{key}_token_id")
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
    if name not in _PRE:
        raise UserError(f"{where} splits text into words like {name!r:.40}, which gpt does not know", HINT)
    if not isinstance(merges, list):
        raise UserError(f"{where} is damaged: its tokenizer has no merges", HINT)
    pre = _PRE[name]
    split = {
        _DIGITS: {"type": "Digits", "individual_digits": True},
        _LLAMA3: _split(LLAMA3_PATTERN),
        _QWEN2: _split(LLAMA3_PATTERN.replace("{1,3}", "")),
        _TEKKEN: _split(_TEKKEN_PATTERN),
    }.get(pre)
    level = _LEVEL | {"use_regex": pre in (_GPT2, _DIGITS)}
    vocab = {word: id for id, word in enumerate(tokens) if types[id] != _UNUSED}
    # llama.cpp needs a merge, so a file without merges has one of tokens that don't exist.
    merges = [merge for merge in merges if merge.split(" ", 1)[0] in vocab]
    return {
        # Qwen's own tokenizers normalize text; llama.cpp does not.
        "normalizer": {"type": "NFC"} if name in ("qwen2", "deepseek-r1-qwen") else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]} if split else level,
        "decoder": _LEVEL,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": pre in _IGNORES_MERGES, "vocab": vocab, "merges": merges,
        },
    }  # fmt: skip


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


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
