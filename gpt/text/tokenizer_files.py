"""Tokenizers in files: found by name or path, read, and saved, in our files and those of the tokenizers library."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpt.errors import UserError, did_you_mean
from gpt.files import (
    JSON_LIMIT,
    check_new,
    disk_errors,
    read_json,
    read_regular,
    reading,
    to_json,
    whole_folder,
    write_file,
)
from gpt.text.boundaries import GPT2_PATTERN
from gpt.text.tokenizer import (
    END_OF_TEXT,
    GPT2_FINGERPRINT,
    Tokenizer,
    describe,
    from_tiktoken,
    named_tokenizer,
    named_tokenizers,
    to_tiktoken,
)

FORMAT = 1
RANKS = "tokenizer.tiktoken"
NEW = "give another place with --out"
_DESCRIBED = ("gpt.json", "manifest.json")  # describe the tokenizer beside its ranks


def find_tokenizer(word: str) -> Tokenizer:
    """Returns the tokenizer of a name, or at a path: our files, transformers', or a run. Names come before paths.

    Raises `UserError` where there is none.
    """
    if word in named_tokenizers():
        return named_tokenizer(word)
    with reading(Path(word)):
        return _at(Path(word), word)


def _at(path: Path, word: str) -> Tokenizer:
    if path.is_dir():
        found = next((each for folder in _folders(path) if (each := _in_folder(folder))), None)
        if found is None:
            raise UserError(
                f"the folder {path} holds no tokenizer",
                f"it would be {RANKS} beside gpt.json, tokenizer.json, or vocab.json and merges.txt",
            )
        return found
    if path.exists():
        return _in_file(path)
    if "/" in word or "\\" in word or "." in word:
        raise UserError(f"there is no tokenizer at {word}", "names: " + ", ".join(named_tokenizers()))
    raise UserError(f'there is no tokenizer "{word}"', did_you_mean(word, ["auto", *named_tokenizers()]))


def _folders(path: Path) -> list[Path]:
    """Returns the folders that may hold a tokenizer: this one; a run's tokens, then its checkpoints, newest first."""
    steps = [each for each in path.iterdir() if re.fullmatch(r"step-\d+", each.name)]
    return [path, path / "tokens", *sorted(steps, key=lambda step: int(step.name[5:]), reverse=True)]


def _in_folder(folder: Path) -> Tokenizer | None:
    if (folder / RANKS).is_file():
        for name in _DESCRIBED:
            said = read_json(folder / name).get("tokenizer") if (folder / name).is_file() else None
            if said is not None:
                return read_own(folder, said, str(folder / name))
    return read_transformers(folder)


def _in_file(path: Path) -> Tokenizer:
    if path.name == RANKS:
        return find_tokenizer(str(path.absolute().parent))
    if path.suffix == ".json":
        return from_tokenizer_json(read_json(path), str(path))
    raise UserError(f"{path} is no tokenizer", f"a tokenizer is a tokenizer.json, or a folder with one or with {RANKS}")


def read_own(folder: Path, said: Any, where: str) -> Tokenizer:
    """Reads a tokenizer: the ranks in ``folder``, and what `describe` ``said`` of it in the file ``where``.

    Raises `UserError` where one does not fit the other.
    """
    file = folder / RANKS
    ranks = from_tiktoken(read_regular(file, JSON_LIMIT), str(file))
    try:
        specials = dict(said.get("specials", {}))
        tokenizer = Tokenizer(said["name"], said["pattern"], ranks, said["eot"], said["eot_token"], specials)
        fits = tokenizer.fingerprint == said["fingerprint"]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{where} does not describe its tokenizer") from None
    if not fits:
        raise UserError(f"{file} is not the tokenizer that {where} describes: the fingerprint differs")
    return tokenizer


def read_transformers(folder: Path) -> Tokenizer | None:
    """Reads the tokenizer in a folder of transformers'; None where there is none."""
    whole, vocab, merges = folder / "tokenizer.json", folder / "vocab.json", folder / "merges.txt"
    if whole.is_file():
        return from_tokenizer_json(read_json(whole), str(whole))
    if vocab.is_file() and merges.is_file():
        text = read_regular(merges, JSON_LIMIT).decode("utf-8", "replace")
        return from_vocab_and_merges(read_json(vocab), text, str(vocab))
    return None


def tokenizer_files(tokenizer: Tokenizer, block_size: int | None = None) -> dict[str, bytes]:
    """Returns names and contents of the files that tiktoken, the tokenizers library and transformers read."""
    return {
        "tokenizer.json": json.dumps(to_tokenizer_json(tokenizer), ensure_ascii=False).encode(),
        "tokenizer_config.json": to_json(to_tokenizer_config(tokenizer, block_size)),
        RANKS: to_tiktoken(tokenizer.ranks),
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes ``folder``, whole or not at all, for `find_tokenizer` and transformers.

    Raises `UserError` where something of that name is there, `WorkError` where it cannot be written.
    """
    check_new(folder, NEW)
    own: Mapping[str, Any] = {"format": FORMAT, "tokenizer": describe(tokenizer)}
    files = {**tokenizer_files(tokenizer), "gpt.json": to_json(own)}
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(folder) as beside:
            for name, data in files.items():
                write_file(beside / name, data)


def byte_characters() -> dict[int, str]:
    """Returns the printable character that GPT-2's files write for each byte: itself if printable and no space,
    else the next free one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def merging_pairs(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Returns the pairs that make tokens of two bytes or more, in merging order: what is left of a token's bytes when
    all merges of lower rank are done. tiktoken merges the pair of the lowest rank, so these pairs mean the same."""
    pairs = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = [token[i : i + 1] for i in range(len(token))]
            joined = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
            while len(parts) > 2 and (least := min(joined)) < rank:
                at = joined.index(least)
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
                del joined[at]
                for i in range(max(0, at - 1), min(at + 1, len(joined))):
                    joined[i] = ranks.get(parts[i] + parts[i + 1], rank)
            if len(parts) == 2:  # others cannot be reached by merging
                pairs.append((parts[0], parts[1]))
    return pairs


def to_tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns ``tokenizer.json``, with which the tokenizers library gives the same ids."""
    characters = byte_characters()

    def written(token: bytes) -> str:
        return token.decode("latin-1").translate(characters)

    by_rank = sorted(tokenizer.ranks.items(), key=lambda item: item[1])
    level: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    pre = level
    if tokenizer.pattern != GPT2_PATTERN:
        split = {
            "type": "Split", "pattern": {"Regex": tokenizer.pattern}, "behavior": "Isolated", "invert": False,
        }  # fmt: skip
        pre = {"type": "Sequence", "pretokenizers": [split, level | {"use_regex": False}]}
    added = [
        {
            "id": id, "content": word, "single_word": False,
            "lstrip": False, "rstrip": False, "normalized": False, "special": True,
        }
        for word, id in sorted(tokenizer.all_specials.items(), key=lambda item: item[1])
    ]  # fmt: skip
    pairs = merging_pairs(tokenizer.ranks)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": pre,
        "post_processor": level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            # As tiktoken does, where some token is reached by no merge: a whole piece that is a token is that token.
            "ignore_merges": len(pairs) < sum(len(token) > 1 for token in tokenizer.ranks),
            "vocab": {written(token): rank for token, rank in by_rank} | tokenizer.all_specials,
            "merges": [f"{written(a)} {written(b)}" for a, b in pairs],
        },
    }


def to_tokenizer_config(tokenizer: Tokenizer, block_size: int | None) -> dict[str, Any]:
    """Returns ``tokenizer_config.json``; ``block_size`` is the longest context, if known.

    Only GPT-2's own pattern may say GPT2Tokenizer: transformers 5 would put that pattern in the place of another."""
    gpt2 = tokenizer.pattern == GPT2_PATTERN
    return {
        "tokenizer_class": "GPT2Tokenizer" if gpt2 else "PreTrainedTokenizerFast",
        "bos_token": tokenizer.eot_token,
        "eos_token": tokenizer.eot_token,
        "unk_token": tokenizer.eot_token,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **({"extra_special_tokens": list(tokenizer.specials)} if tokenizer.specials else {}),
        **({} if block_size is None else {"model_max_length": block_size}),
    }


def from_tokenizer_json(values: Mapping[str, Any], where: str) -> Tokenizer:
    """Reads a ``tokenizer.json``, if it is a byte-level BPE that tiktoken can run with the same ids.

    Raises `UserError` naming a part that tiktoken cannot run.
    """
    try:
        model = values["model"]
        if model.get("type", "BPE") != "BPE" or values.get("normalizer") is not None:
            raise UserError(f"{where}: only a byte-level BPE without normalizer can be run here")
        pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
        added = {token["content"]: token["id"] for token in values.get("added_tokens") or []}
        plain = [token["content"] for token in values.get("added_tokens") or [] if not token.get("special")]
        if plain:
            raise UserError(f"{where}: its token {plain[0]!r} is found in ordinary text before merging")
        pattern = _pattern(values.get("pre_tokenizer"), where)
        return _from_vocab(model["vocab"], pairs, added, pattern, where, bool(model.get("ignore_merges")))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{where} is no tokenizer of the tokenizers library: {type(error).__name__} {error}") from None


def from_vocab_and_merges(vocab: Mapping[str, int], merges_text: str, where: str) -> Tokenizer:
    """Reads the older pair ``vocab.json`` and ``merges.txt``, with GPT-2's pattern."""
    lines = [line for line in merges_text.split("\n") if line and not line.startswith("#version")]
    return _from_vocab(vocab, [tuple(line.split(" ")) for line in lines], {}, GPT2_PATTERN, where)


def _pattern(pre: Any, where: str) -> str:
    """Returns the pattern of a pre-tokenizer: ByteLevel's own, or a Split before it."""
    steps = pre.get("pretokenizers", []) if isinstance(pre, dict) and pre.get("type") == "Sequence" else [pre]
    kinds = [step.get("type") if isinstance(step, dict) else None for step in steps]
    if kinds == ["ByteLevel"] and not steps[0].get("add_prefix_space") and steps[0].get("use_regex", True):
        return GPT2_PATTERN
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("add_prefix_space") and not steps[1].get("use_regex", True):
        regex = steps[0].get("pattern", {}).get("Regex")
        if isinstance(regex, str) and steps[0].get("behavior") == "Isolated" and not steps[0].get("invert"):
            return regex
    raise UserError(f"{where}: its pre-tokenizer {json.dumps(pre)[:120]} is not one that can be run here")


def _from_vocab(
    vocab: Mapping[str, int],
    pairs: list[tuple[str, ...]],
    added: Mapping[str, int],
    pattern: str,
    where: str,
    whole: bool = False,
) -> Tokenizer:
    """Makes a tokenizer. ``whole``: a piece that is a token needs no merges, as in tiktoken."""
    characters = byte_characters()
    bytes_of = {character: byte for byte, character in characters.items()}
    specials = {**{k: v for k, v in vocab.items() if k == END_OF_TEXT}, **added}
    eot_token = END_OF_TEXT if END_OF_TEXT in specials else next(iter(specials), "")
    if eot_token != END_OF_TEXT and len(specials) != 1:
        raise UserError(f"{where} has {len(specials)} special tokens, and none is {END_OF_TEXT}: which ends a text?")
    try:
        ranks = {bytes(bytes_of[c] for c in token): rank for token, rank in vocab.items() if token not in specials}
        in_order = [ranks[bytes(bytes_of[c] for c in "".join(pair))] for pair in pairs]
    except (KeyError, TypeError):
        raise UserError(f"{where}: its tokens are not written in GPT-2's byte characters") from None
    if not all(type(rank) is int for rank in ranks.values()) or in_order != sorted(in_order):
        raise UserError(f"{where}: its merges are in another order than its ids; tiktoken cannot run such a vocabulary")
    eot = specials.pop(eot_token)
    tokenizer = Tokenizer("bpe", pattern, ranks, eot, eot_token, specials)
    if tokenizer.fingerprint == GPT2_FINGERPRINT:
        return replace(tokenizer, name="gpt2")
    _check_merges(ranks, pairs, where, whole)
    _check_pattern(tokenizer, where)
    return tokenizer


def _check_merges(ranks: Mapping[bytes, int], pairs: list[tuple[str, ...]], where: str, whole: bool) -> None:
    """tiktoken merges whatever pair makes a token and takes a piece that is a token whole, the tokenizers library
    merges the listed pairs alone: raises `UserError` where that is not the same."""
    characters = byte_characters()
    written = [
        ("".join(map(characters.__getitem__, a)), "".join(map(characters.__getitem__, b)))
        for a, b in merging_pairs(ranks)
    ]
    if written != pairs or not (whole or len(pairs) == sum(len(token) > 1 for token in ranks)):
        raise UserError(
            f"{where}: its merges are not those that its tokens imply; tiktoken cannot run such a vocabulary"
        )


def _check_pattern(tokenizer: Tokenizer, where: str) -> None:
    """Raises `UserError` for a pattern that misses some characters: tiktoken drops what is between its pieces."""
    text = "Words, 12345 and it's!\r\n\n  \t_é日½ \u0301\u200d🐕 /\x00\x1c\u00a0"
    if tokenizer.decode(tokenizer.encode(text).tolist()) != text:
        raise UserError(f"{where}: its pattern {tokenizer.pattern[:80]!r} passes over parts of a text")
