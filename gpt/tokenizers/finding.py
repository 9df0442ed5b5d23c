"""Finds a tokenizer by name or path, and reads tokenizers that gpt saved."""

import re
from pathlib import Path
from typing import Any

from gpt.system.errors import UserError, did_you_mean
from gpt.system.files import JSON_LIMIT, read_json, read_regular, reading, suggest_name
from gpt.system.gguf_header import is_gguf
from gpt.tokenizers.backends import ByteBPE, LibraryTokenizer
from gpt.tokenizers.importing import (
    from_tiktoken,
    from_tokenizer_json,
    named_tokenizer,
    named_tokenizers,
    read_gguf,
    read_json_bytes,
    read_kept,
    read_transformers,
)
from gpt.tokenizers.saving import RANKS, TOKENIZER_CONFIG, TOKENIZER_JSON, UNCHANGED_FILES
from gpt.tokenizers.tokenizer import CHAT_TEMPLATE, Tokenizer

_DESCRIPTION_FILES = ("gpt.json", "manifest.json")


def find_tokenizer(word: str) -> Tokenizer:
    """Returns a tokenizer by name, or from the path of a tokenizer, a Transformers folder or a run. Tries names first.
    Raises `UserError` if there is no tokenizer."""
    if word in named_tokenizers():
        return named_tokenizer(word)
    with reading(Path(word)):
        return _read_path(Path(word), word)


def _read_path(path: Path, word: str) -> Tokenizer:
    if path.is_dir():
        tokenizer = next(
            (candidate for folder in _candidate_folders(path) if (candidate := _read_folder(folder))), None
        )
        if tokenizer is None:
            raise UserError(
                f"the folder {path} contains no tokenizer",
                f"a tokenizer is {RANKS} with gpt.json, or tokenizer.json",
            )
        return tokenizer
    if path.exists():
        return _read_file(path)
    if "/" in word or "\\" in word or "." in word:
        hint = suggest_name(word, "names: " + ", ".join(named_tokenizers()))
        raise UserError(f"there is no tokenizer at {word}", hint)
    raise UserError(f'there is no tokenizer "{word}"', did_you_mean(word, ["auto", *named_tokenizers()]))


def _candidate_folders(path: Path) -> list[Path]:
    """Returns the folders to search: the given folder, then the tokens and checkpoints of a run, newest first."""
    checkpoints = [entry for entry in path.iterdir() if re.fullmatch(r"step-\d+", entry.name)]
    return [path, path / "tokens", *sorted(checkpoints, key=lambda step: int(step.name[5:]), reverse=True)]


def _read_folder(folder: Path) -> Tokenizer | None:
    for name in _DESCRIPTION_FILES:
        description = read_json(folder / name).get("tokenizer") if (folder / name).is_file() else None
        if description is not None and described_file(folder, description).is_file():
            return read_described_tokenizer(folder, description, str(folder / name))
    return read_transformers(folder)


def _read_file(path: Path) -> Tokenizer:
    if path.name == RANKS:
        return find_tokenizer(str(path.absolute().parent))
    if path.name == TOKENIZER_JSON and (tokenizer := read_transformers(path.absolute().parent)):
        return tokenizer
    if path.suffix == ".json":
        return from_tokenizer_json(read_json(path), str(path), {TOKENIZER_JSON: read_json_bytes(path)})
    if is_gguf(path) and (tokenizer := read_gguf(path)):
        return tokenizer
    raise UserError(f"{path} is not a tokenizer", f"one is a tokenizer.json, or a folder with one or with {RANKS}")


def described_file(folder: Path, description: Any) -> Path:
    """Returns the tokenizer file that ``description`` requires in ``folder``."""
    return folder / (TOKENIZER_JSON if isinstance(description, dict) and description.get("library") else RANKS)


def read_described_tokenizer(folder: Path, description: Any, where: str) -> Tokenizer:
    """Reads a tokenizer from ``folder``. ``description``, from the file ``where``, is a result of `describe`. Raises
    `UserError` if the tokenizer does not match the description."""
    try:
        files = read_kept(folder, [name for name in UNCHANGED_FILES if name in description.get("files", [])])
        file = described_file(folder, description)
        backend: ByteBPE | LibraryTokenizer
        if description.get("library"):
            backend = LibraryTokenizer(read_json_bytes(file, parsed=True), read_json(file))
        else:
            ranks = from_tiktoken(read_regular(file, JSON_LIMIT), str(file))
            backend = ByteBPE(description["pattern"], ranks)
        tokenizer = Tokenizer(
            description["name"],
            backend,
            description["eot"],
            description["eot_token"],
            dict(description.get("specials", {})),
            dict(description.get("words", {})),
            description.get("bos"),
            frozenset(description.get("more_ends", [])),
            files,
        )
        is_same = tokenizer.fingerprint == description["fingerprint"]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{where} does not describe its tokenizer") from None
    if not is_same:
        raise UserError(f"{file} is not the tokenizer that {where} describes: the fingerprint differs")
    return tokenizer


def read_template(folder: Path) -> dict[str, bytes]:
    """Returns the chat template of a folder without a tokenizer, in the form of `Tokenizer.files`."""
    files = read_kept(folder, (CHAT_TEMPLATE, TOKENIZER_CONFIG))
    template = Tokenizer.template_in(files)
    return {} if template is None else {CHAT_TEMPLATE: template.encode()}
