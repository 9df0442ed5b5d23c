"""Saves tokenizers, for gpt, tiktoken, the tokenizers library and Transformers."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpt.system.files import atomic_folder, check_new, disk_errors, to_json, write_file
from gpt.tokenizers.backends import BYTE_LEVEL, ByteBPE, LibraryTokenizer, added_token, to_gpt2_spelling
from gpt.tokenizers.boundaries import GPT2_PATTERN
from gpt.tokenizers.tokenizer import CHAT_TEMPLATE, Tokenizer, describe, to_tiktoken

FORMAT = 1
_NO_RANK = 2**63  # Rank of a pair that never merges.
TOKENIZER_JSON, TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
# Transformers files that are saved unchanged.
UNCHANGED_FILES = (TOKENIZER_JSON, TOKENIZER_CONFIG, SPECIAL_TOKENS, CHAT_TEMPLATE, "added_tokens.json")
RANKS = "tokenizer.tiktoken"
NEW_PATH_HINT = "choose another path with --out"


def tokenizer_files(tokenizer: Tokenizer, block_size: int | None = None) -> dict[str, bytes]:
    """Returns a tokenizer's files by name, for tiktoken, the tokenizers library and Transformers. Kept files are
    unchanged."""
    ranks = {RANKS: to_tiktoken(tokenizer.backend.ranks)} if isinstance(tokenizer.backend, ByteBPE) else {}
    if TOKENIZER_JSON in tokenizer.files:
        return {**tokenizer.files, **ranks}
    return {
        TOKENIZER_JSON: json.dumps(to_tokenizer_json(tokenizer), ensure_ascii=False).encode(),
        TOKENIZER_CONFIG: to_json(to_tokenizer_config(tokenizer, block_size)),
        **ranks,
        **tokenizer.files,
    }


def add_specials(tokenizer: Tokenizer, words: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer with further special tokens, which get the next ids. Updates a kept ``tokenizer.json``."""
    new_ids = {word: id for id, word in enumerate(words, tokenizer.vocab_size)}
    files, backend = dict(tokenizer.files), tokenizer.backend
    if not new_ids:
        return tokenizer
    if TOKENIZER_JSON in files:
        values = json.loads(files[TOKENIZER_JSON])
        values["added_tokens"] = [*(values.get("added_tokens") or []), *added_tokens(new_ids)]
        files[TOKENIZER_JSON] = json.dumps(values, ensure_ascii=False).encode()
        files.pop("added_tokens.json", None)  # tokenizer.json contains all added tokens.
        config = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
        if "added_tokens_decoder" in config:
            config["added_tokens_decoder"] |= {
                str(token["id"]): {key: value for key, value in token.items() if key != "id"}
                for token in added_tokens(new_ids)
            }
            files[TOKENIZER_CONFIG] = to_json(config)
        backend = LibraryTokenizer(files[TOKENIZER_JSON], values) if isinstance(backend, LibraryTokenizer) else backend
    return replace(tokenizer, backend=backend, specials={**tokenizer.specials, **new_ids}, files=files)


def added_tokens(words: Mapping[str, int]) -> list[dict[str, Any]]:
    """Returns added tokens as ``tokenizer.json`` lists them, sorted by id."""
    return [added_token(id, word) for word, id in sorted(words.items(), key=lambda item: item[1])]


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes ``folder`` atomically, for `find_tokenizer` and Transformers. Raises `UserError` for an existing folder,
    `WorkError` if writing fails."""
    check_new(folder, NEW_PATH_HINT)
    description: Mapping[str, Any] = {"format": FORMAT, "tokenizer": describe(tokenizer)}
    files = {**tokenizer_files(tokenizer), "gpt.json": to_json(description)}
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(folder) as temp_folder:
            for name, data in files.items():
                write_file(temp_folder / name, data)


def merging_pairs(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Returns each token's last merge as a pair, ordered by rank. Single bytes, and tokens that merging never produces,
    have no pair.

    tiktoken merges the neighbors whose token has the lowest rank, leftmost first. When it merges ``a`` and ``b`` in any
    text, earlier merges of their bytes were the same as in the text ``a + b``. So no other pair produces this token,
    and the pairs are equivalent to the ranks.
    """
    pairs = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = [token[i : i + 1] for i in range(len(token))]
            pair_ranks = [ranks.get(a + b, _NO_RANK) for a, b in pairwise(parts)]
            while len(parts) > 2 and (min_rank := min(pair_ranks)) < _NO_RANK:
                index = pair_ranks.index(min_rank)
                parts[index : index + 2] = [parts[index] + parts[index + 1]]
                del pair_ranks[index]
                for i in range(max(0, index - 1), min(index + 1, len(pair_ranks))):
                    pair_ranks[i] = ranks.get(parts[i] + parts[i + 1], _NO_RANK)
            if len(parts) == 2:
                pairs.append((parts[0], parts[1]))
    return pairs


def to_tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns a ``tokenizer.json`` that gives the same ids in the tokenizers library."""
    assert isinstance(tokenizer.backend, ByteBPE)
    ranks = tokenizer.backend.ranks
    by_rank = sorted(ranks.items(), key=lambda item: item[1])
    pre_tokenizer = BYTE_LEVEL
    if tokenizer.pattern != GPT2_PATTERN:
        split = {
            "type": "Split", "pattern": {"Regex": tokenizer.pattern}, "behavior": "Isolated", "invert": False,
        }  # fmt: skip
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL | {"use_regex": False}]}
    pairs = merging_pairs(ranks)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(tokenizer.all_specials),
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": BYTE_LEVEL,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            # If merges cannot produce every token, a piece that equals a token is kept whole, as in tiktoken.
            "ignore_merges": len(pairs) < sum(len(token) > 1 for token in ranks),
            "vocab": {to_gpt2_spelling(token): rank for token, rank in by_rank} | tokenizer.all_specials,
            "merges": format_merges(pairs),
        },
    }


def to_tokenizer_config(tokenizer: Tokenizer, block_size: int | None) -> dict[str, Any]:
    """Returns ``tokenizer_config.json``. ``block_size`` is the context length, if known. The class is
    GPT2Tokenizer only with GPT-2's pattern, because transformers 5 replaces the pattern of that class."""
    gpt2 = tokenizer.pattern == GPT2_PATTERN
    return {
        "tokenizer_class": "GPT2Tokenizer" if gpt2 else "PreTrainedTokenizerFast",
        "bos_token": tokenizer.eot_token,
        "eos_token": tokenizer.eot_token,
        "unk_token": tokenizer.eot_token,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **({"additional_special_tokens": list(tokenizer.specials)} if tokenizer.specials else {}),
        **({} if block_size is None else {"model_max_length": block_size}),
    }


def format_merges(pairs: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """Returns merges in the form of older files: a string per pair."""
    return [f"{to_gpt2_spelling(a)} {to_gpt2_spelling(b)}" for a, b in pairs]
