"""Tokenizers as words on a command line and as files: found, made, read and saved."""

import json
import re
from collections.abc import Iterable, Mapping
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
from gpt.text import tokenizer_json
from gpt.text.tokenizer import (
    Tokenizer,
    auto_vocab_size,
    describe,
    from_tiktoken,
    learn_tokenizer,
    learn_tokenizer_up_to,
    named_tokenizer,
    named_tokenizers,
    to_tiktoken,
)

FORMAT = 1
RANKS = "tokenizer.tiktoken"
NEW = "give another place with --out"
_DESCRIBED = ("gpt.json", "manifest.json")  # what describes the tokenizer beside its ranks


def make_tokenizer(
    kind: str, vocab_size: int | None, texts: Iterable[str], n_bytes: int, most: int = 2**24
) -> Tokenizer:
    """The tokenizer that ``--tokenizer`` and ``--vocab-size`` ask for. ``texts``, of a corpus of ``n_bytes``, is what
    it may learn from; ``most`` bounds the size where none was asked for."""
    if kind != "auto":
        return find_tokenizer(kind)
    if vocab_size is not None:
        return learn_tokenizer(texts, vocab_size)
    return learn_tokenizer_up_to(texts, min(most, auto_vocab_size(n_bytes)))


def find_tokenizer(word: str) -> Tokenizer:
    """The tokenizer of that name, or at that path: our files, transformers', or a run. Names come before paths.

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
    """Where a folder may keep its tokenizer: in itself; a run in its tokens, else in its newest checkpoint."""
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
        return tokenizer_json.from_tokenizer_json(read_json(path), str(path))
    raise UserError(f"{path} is no tokenizer", f"a tokenizer is a tokenizer.json, or a folder with one or with {RANKS}")


def read_own(folder: Path, said: Any, where: str) -> Tokenizer:
    """The tokenizer of the ranks in ``folder`` and of what `describe` ``said`` of it in the file ``where``.

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
    """The tokenizer in a folder of transformers', if it has one."""
    whole, vocab, merges = folder / "tokenizer.json", folder / "vocab.json", folder / "merges.txt"
    if whole.is_file():
        return tokenizer_json.from_tokenizer_json(read_json(whole), str(whole))
    if vocab.is_file() and merges.is_file():
        text = read_regular(merges, JSON_LIMIT).decode("utf-8", "replace")
        return tokenizer_json.from_vocab_and_merges(read_json(vocab), text, str(vocab))
    return None


def tokenizer_files(tokenizer: Tokenizer, block_size: int | None = None) -> dict[str, bytes]:
    """Names and contents of the files that tiktoken, the tokenizers library and transformers read."""
    return {
        "tokenizer.json": json.dumps(tokenizer_json.to_tokenizer_json(tokenizer), ensure_ascii=False).encode(),
        "tokenizer_config.json": to_json(tokenizer_json.to_tokenizer_config(tokenizer, block_size)),
        RANKS: to_tiktoken(tokenizer.ranks),
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes ``folder``, whole or not at all, such that `find_tokenizer` and transformers read it.

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
