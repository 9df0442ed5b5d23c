"""Converts the tokenizer in a GGUF file's metadata to a ``tokenizer.json``, and decides where llama.cpp stops.

Names and defaults follow llama.cpp (src/llama-vocab.cpp, `llama_vocab::impl::load`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpt.config.model import MAX_VOCAB_SIZE
from gpt.system import gguf_header
from gpt.system.errors import UserError, check_text
from gpt.system.gguf_header import read_value
from gpt.tokenizers.backends import BYTE_LEVEL, added_token
from gpt.tokenizers.boundaries import LLAMA3_PATTERN

HINT = "use the model's Transformers folder instead"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # Token types of llama.cpp.
MAX_SPLITS = 2**25  # Maximum characters of the splits of all SentencePiece tokens. Gemma's have about 2²⁴.
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
# llama.cpp stops at each token with one of these texts, whatever its type.
_END_WORDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
}  # fmt: skip
# Fill-in-the-middle tokens by llama.cpp's names: the token that a key names, or else one with one of these texts.
FIM_WORDS = {
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
                "<|code_prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
                "<|code_suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
                "<|code_middle|>"),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}  # fmt: skip
FIM_ENDS = ("fim_pad", "fim_rep", "fim_sep")  # llama.cpp stops at these.
END_KEYS = ("eos", "eot", "eom")  # More keys of ids at which llama.cpp stops.
# Here a word that is a token needs no merges, and a BOS token begins a text unless the file says otherwise.
_LIKE_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")


def end_ids(words: Mapping[str, int], given: Mapping[str, int]) -> list[int]:
    """Returns the ids at which llama.cpp stops, by the texts of all tokens and the ids that the file's keys name."""
    ends = [given[key] for key in END_KEYS if key in given] + sorted(words[text] for text in _END_WORDS & words.keys())
    for key in FIM_ENDS:
        ends += [given[key]] if key in given else [words[text] for text in FIM_WORDS[key] if text in words]
    has_calls = {"<|call|>", "<|calls|>"} & words.keys() and {"<|return|>", "<|flush|>"} & words.keys()
    continuing = ("<|end|>" if has_calls else "", "</s>" if "<|tool_response>" in words else "")
    return [id for id in dict.fromkeys(ends) if id not in map(words.get, filter(None, continuing))]


def read_vocabulary(metadata: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any], list[int], str]:
    """Returns the tokenizer of a GGUF file: contents of ``tokenizer.json`` and ``tokenizer_config.json``, the ids that
    end a text, and the chat template or "". Raises `UserError` if it is of an unknown kind or damaged."""
    kind = read_value(metadata, "tokenizer.ggml.model", "", where)
    tokens: list[str] = read_value(metadata, "tokenizer.ggml.tokens", [], where)
    if kind not in ("gpt2", "llama"):
        raise UserError(f"{where} has a tokenizer of type {kind!r:.40}; gpt reads gpt2 and llama", HINT)
    words = {word: id for id, word in enumerate(tokens)}
    if not 0 < len(words) == len(tokens) <= MAX_VOCAB_SIZE:
        raise UserError(f"{where} is damaged: {len(words):,} of {len(tokens):,} tokens differ", gguf_header.HINT)
    template = read_value(metadata, "tokenizer.chat_template", "", where)
    check_text(f"a token or the chat template of {where}", "".join((*tokens, template)), HINT)
    types = _numbers(metadata, "token_type", np.full(len(tokens), _NORMAL), where)
    given = {"bos": 1, "eos": 2} if kind == "llama" and len(tokens) > 2 else {}  # llama.cpp's defaults.
    for name in ("bos", *END_KEYS, *FIM_ENDS):
        id = read_value(metadata, f"tokenizer.ggml.{name}_token_id", -1, where)
        given |= {name: id} if 0 <= id < len(tokens) else {}
    ends = end_ids(words, given)
    if not ends:
        raise UserError(f"{where} has no token that ends a text", HINT)
    for id in ends:
        if types[id] in (_NORMAL, _UNUSED) or tokens[id] in _END_WORDS:  # llama.cpp does this, with a warning.
            types[id] = _CONTROL
    adds_bos = kind == "llama" or read_value(metadata, "tokenizer.ggml.pre", "", where) in _LIKE_LLAMA3
    adds_bos, bos = read_value(metadata, "tokenizer.ggml.add_bos_token", adds_bos, where), given.get("bos")
    values = {
        "version": "1.0",
        "added_tokens": [
            added_token(id, word, type_ != _USER_DEFINED)
            for id, (word, type_) in enumerate(zip(tokens, types, strict=True))
            if type_ in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ],
        "post_processor": _template(tokens[bos], bos) if adds_bos and bos is not None else None,
        **(_byte_level if kind == "gpt2" else _sentence_pieces)(metadata, tokens, types, where),
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **({} if bos is None else {"bos_token": tokens[bos]}),
        "eos_token": tokens[ends[0]],
    }
    return values, config, ends, template


def _numbers(metadata: Mapping[str, Any], name: str, default: Any, where: str) -> list[Any]:
    """Returns a number per token."""
    numbers = read_value(metadata, f"tokenizer.ggml.{name}", default, where)
    if len(numbers) != len(metadata["tokenizer.ggml.tokens"]) or not np.isfinite(numbers).all():
        raise UserError(f"{where} is damaged: its tokens have no valid {name}", gguf_header.HINT)
    return list(numbers.tolist())


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
    name = read_value(metadata, "tokenizer.ggml.pre", "", where)
    merges: list[str] = read_value(metadata, "tokenizer.ggml.merges", [], where)
    if name not in _PATTERNS:
        raise UserError(f"{where} splits text into words like {name!r:.40}, which gpt does not know", HINT)
    if not merges:
        raise UserError(f"{where} is damaged: its tokenizer has no merges", gguf_header.HINT)
    pattern = _PATTERNS[name]
    has_own_pattern = pattern in (_GPT2, _DIGITS)
    steps: list[dict[str, Any]] = [BYTE_LEVEL | {"use_regex": has_own_pattern}]
    if pattern == _DIGITS:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    elif not has_own_pattern:
        steps.insert(0, {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})
    vocab = {word: id for id, word in enumerate(tokens) if types[id] != _UNUSED}
    if len(merges) == 1 and merges[0].split(" ")[0] not in vocab:  # The placeholder that llama.cpp needs.
        merges = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise UserError(f"{where} is damaged: no token results from the merge {merge!r:.60}", gguf_header.HINT)
    return {
        # Qwen's own tokenizers normalize text; llama.cpp does not.
        "normalizer": {"type": "NFC"} if name in ("qwen2", "deepseek-r1-qwen") else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0],
        "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "ignore_merges": name in _LIKE_LLAMA3, "vocab": vocab, "merges": merges},
    }


def _sentence_pieces(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], where: str
) -> dict[str, Any]:
    """Returns the parts of a ``tokenizer.json`` for a SentencePiece BPE. Tokens with higher scores are merged first."""
    scores = _numbers(metadata, "scores", np.zeros(0), where)
    vocab = {word: id for id, word in enumerate(tokens) if types[id] != _UNUSED}
    pieces = {word: id for word, id in vocab.items() if types[id] == _NORMAL}
    characters = sum(len(word) ** 2 for word in pieces)
    if characters > MAX_SPLITS:
        raise UserError(
            f"{where}: splits of its tokens have {characters:,} characters; {MAX_SPLITS:,} is the limit", HINT
        )
    merges = [
        f"{word[:at]} {word[at:]}"
        for word in sorted(pieces, key=lambda word: (-scores[pieces[word]], pieces[word]))
        for at in range(len(word) - 1, 0, -1)
        if word[:at] in pieces and word[at:] in pieces
    ]
    unknown = next((word for id, word in enumerate(tokens) if types[id] == _UNKNOWN), None)
    space = read_value(metadata, "tokenizer.ggml.add_space_prefix", True, where)
    prefix = [{"type": "Prepend", "prepend": "\u2581"}] if space else []
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    restored = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if space else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, replaced]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [restored, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE", "unk_token": unknown, "fuse_unk": True, "byte_fallback": _BYTE in types, "vocab": vocab,
            "merges": merges,
        },
    }  # fmt: skip
