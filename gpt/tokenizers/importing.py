"""Imports tokenizers of other programs: tiktoken's, Transformers folders, ``tokenizer.json`` and GGUF files."""

import base64
import codecs
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import tiktoken

from gpt.config.model import MAX_VOCAB_SIZE
from gpt.system.errors import UserError, WorkError
from gpt.system.files import JSON_LIMIT, cache_dir, read_json, read_regular, to_json
from gpt.system.gguf_header import header
from gpt.tokenizers import gguf_vocabulary
from gpt.tokenizers.backends import CHARACTER_BYTES, ByteBPE, LibraryTokenizer
from gpt.tokenizers.boundaries import GPT2_PATTERN
from gpt.tokenizers.saving import (
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    UNCHANGED_FILES,
    added_tokens,
    format_merges,
    merging_pairs,
)
from gpt.tokenizers.tokenizer import CHAT_TEMPLATE, END_OF_TEXT, GPT2_FINGERPRINT, Tokenizer, bytes_tokenizer
from gpt.tokenizers.untrusted import steps


def read_kept(folder: Path, names: Iterable[str], parsed: str = "") -> dict[str, bytes]:
    """Reads the files to save unchanged. Raises `UserError` for a file that is too large or invalid JSON. ``parsed``
    names a file whose JSON is already checked."""
    return {name: read_json_bytes(folder / name, name == parsed) for name in names if (folder / name).is_file()}


def read_json_bytes(path: Path, parsed: bool = False) -> bytes:
    """Returns a file unchanged, without its byte-order mark. Raises `UserError` for invalid JSON, unless ``parsed``."""
    if path.suffix == ".json" and not parsed:
        read_json(path)
    return read_regular(path, JSON_LIMIT).removeprefix(codecs.BOM_UTF8)


def read_transformers(folder: Path) -> Tokenizer | None:
    """Reads the tokenizer of a Transformers folder, or returns None."""
    path = folder / TOKENIZER_JSON
    if path.is_file():
        files = read_kept(folder, UNCHANGED_FILES, TOKENIZER_JSON)
        return from_tokenizer_json(read_json(path), str(path), files, _read_settings(folder))
    for name in ("tokenizer.model", "vocab.json"):
        if (folder / name).is_file():
            raise UserError(
                f"{folder} has only a {name}; gpt needs a tokenizer.json",
                f"create it: AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})",
            )
    return None


def read_gguf(path: Path) -> Tokenizer | None:
    """Reads the tokenizer of a GGUF file, or returns None if it has none."""
    metadata = header(path).metadata
    if "tokenizer.ggml.model" not in metadata:
        return None
    values, config, ends, template = gguf_vocabulary.read_vocabulary(metadata, str(path))
    files = {TOKENIZER_CONFIG: to_json(config), **({CHAT_TEMPLATE: template.encode()} if template else {})}
    return from_tokenizer_json(values, str(path), files, ({"eos_token_id": ends}, {}, config))


def _complete(values: Mapping[str, Any], files: Mapping[str, bytes], where: str) -> Mapping[str, Any]:
    """Completes a ``tokenizer.json`` as Transformers does. Adds tokens that are only in the other ``files``, makes
    end-of-text special, and applies ``add_prefix_space`` if the class is GPT-2's or Qwen2's."""
    config, names = (json.loads(files.get(name, b"{}")) for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS))
    vocab, listed_tokens = values["model"]["vocab"], values.get("added_tokens") or []
    # Unigram's vocabulary is a list.
    vocab = {word: id for id, (word, _) in enumerate(vocab)} if isinstance(vocab, list) else vocab
    added = {token["content"]: token["id"] for token in listed_tokens}
    size = 1 + max([-1, *vocab.values(), *added.values()])
    new_tokens = _companion_tokens(
        config, names, json.loads(files.get("added_tokens.json", b"{}")), vocab, added, size, where
    )
    if END_OF_TEXT in vocab and END_OF_TEXT not in [*added, *(token["content"] for token in new_tokens)]:
        new_tokens += added_tokens({END_OF_TEXT: vocab[END_OF_TEXT]})
    values = {**values, "added_tokens": [*listed_tokens, *new_tokens]} if new_tokens else values
    if str(config.get("tokenizer_class")).removesuffix("Fast") in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        space = {"add_prefix_space": bool(config.get("add_prefix_space", False))}
        old_steps = steps(values.get("pre_tokenizer"), "pretokenizers")
        new_steps = [{**step, **space} if step.get("type") == "ByteLevel" else step for step in old_steps]
        if new_steps != old_steps:
            values = {**values, "pre_tokenizer": {"type": "Sequence", "pretokenizers": new_steps}}
    return values


def _companion_tokens(
    config: Mapping[str, Any],
    names: Mapping[str, Any],
    added_json: Mapping[str, int],
    vocab: Mapping[str, int],
    added: Mapping[str, int],
    size: int,
    where: str,
) -> list[dict[str, Any]]:
    """Returns the tokens that are only in the files next to a ``tokenizer.json``, in the format of ``added_tokens``. As
    in Transformers, a token's id comes from ``vocab``; tokens that are not in ``vocab`` get new ids from ``size``."""
    try:
        listed_tokens: dict[Any, Any] = config.get("added_tokens_decoder") or {}
        if not listed_tokens:
            config = {**config, **names}
            listed_tokens = {id: {"content": word} for word, id in added_json.items()}
        token_values = [config.get(f"{name}_token") for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            values = config.get(key)
            token_values += values.values() if isinstance(values, dict) else values if isinstance(values, list) else []
        special_words = dict.fromkeys(word for token in token_values if (word := content(token)))
        tokens: dict[str, Any] = {
            token["content"]: token for _, token in sorted(listed_tokens.items(), key=lambda item: int(item[0]))
        }
        new_tokens: list[dict[str, Any]] = []
        for word, token in (tokens | {word: {} for word in special_words if word not in tokens}).items():
            if word in added:
                continue
            id = vocab.get(word, size)
            size = max(size, id + 1)
            flags = {flag: bool(token.get(flag)) for flag in ("single_word", "lstrip", "rstrip")}
            is_special = bool(token.get("special")) or word in special_words
            normalized = bool(token.get("normalized", not is_special))
            new_tokens.append({"id": id, "content": word, **flags, "normalized": normalized, "special": is_special})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"the files next to {where} list no tokens: {_describe_error(error)}") from None
    return new_tokens


def _describe_error(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]!r} is missing"
    return f"a value has the wrong type: {error}"


def _read_settings(folder: Path) -> list[dict[str, Any]]:
    """Returns the configurations that name the tokens that start and end a text: generation_config.json, config.json,
    and tokenizer_config.json merged with special_tokens_map.json. A missing file counts as empty."""
    names = ("generation_config.json", "config.json", SPECIAL_TOKENS, TOKENIZER_CONFIG)
    *models, words, config = [read_json(folder / name) if (folder / name).is_file() else {} for name in names]
    return [*models, {**words, **config}]


def from_tokenizer_json(
    values: Mapping[str, Any],
    where: str,
    files: Mapping[str, bytes] | None = None,
    settings: Sequence[Mapping[str, Any]] = ({}, {}, {}),
) -> Tokenizer:
    """Reads a ``tokenizer.json``. If `to_tokenizer_json` would write the same tokenizer, as for GPT-2, the backend is
    tiktoken. Otherwise it is the tokenizers library. Keeps ``files``. ``settings`` come from `_read_settings`. Raises
    `UserError` for an unsupported file."""
    files = files or {}
    try:
        full_values = _complete(values, files, where)
        data = files.get(TOKENIZER_JSON)
        if data is None or full_values is not values:
            data = json.dumps(full_values, ensure_ascii=False).encode()
        files = {**files, TOKENIZER_JSON: data} if files else {}
        added = [token for token in full_values.get("added_tokens") or [] if token["content"]]
        specials = {token["content"]: token["id"] for token in added if token.get("special")}
        words = {token["content"]: token["id"] for token in added if not token.get("special")}
        library = LibraryTokenizer(data, full_values)
        backend = _as_byte_bpe(library, {*specials, *words}) or library
        if full_values["model"].get("dropout"):
            raise UserError("a tokenizer with dropout gives different ids each time")
        tokenizer = _create_tokenizer(backend, specials, words, _bos_id(full_values), settings, where, files)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{where} is not a tokenizers file: {_describe_error(error)}") from None
    # The built-in GPT-2 tokenizer needs no files.
    gpt2 = tokenizer.fingerprint == GPT2_FINGERPRINT
    return replace(tokenizer, name="gpt2", files={}) if gpt2 else tokenizer


def _create_tokenizer(
    backend: ByteBPE | LibraryTokenizer,
    specials: Mapping[str, int],
    words: Mapping[str, int],
    bos: int | None,
    settings: Sequence[Mapping[str, Any]],
    where: str,
    files: Mapping[str, bytes],
) -> Tokenizer:
    """Creates a tokenizer. Takes the end tokens from the first configuration in ``settings`` that has any. The
    end-of-text token is ``<|endoftext|>`` if that is one of them, otherwise the first one."""
    ends = next((ids for config in settings if (ids := _end_ids(config, {**specials, **words}, backend.pieces))), [])
    if not ends:
        if END_OF_TEXT not in specials and len(specials) != 1:
            hint = 'set "eos_token" in tokenizer_config.json'
            raise UserError(
                f"{where} has {len(specials)} special tokens, none of them {END_OF_TEXT}: which one ends a text?", hint
            )
        ends = [specials[END_OF_TEXT]] if END_OF_TEXT in specials else list(specials.values())
    eot = specials.get(END_OF_TEXT, -1)
    eot = eot if eot in ends else ends[0]
    special_ids = {word: id for word, id in {**specials, **words}.items() if word in specials or id in ends}
    plain_words = {word: id for word, id in words.items() if word not in special_ids}
    eot_token = next(word for word, id in special_ids.items() if id == eot)
    other_ids = {word: id for word, id in special_ids.items() if word != eot_token}
    return Tokenizer("bpe", backend, eot, eot_token, other_ids, plain_words, bos, frozenset(ends) - {eot}, files)


def _end_ids(settings: Mapping[str, Any], added: Mapping[str, int], pieces: Mapping[int, bytes]) -> list[int]:
    """Returns a configuration's end ids, added tokens first. Returns no ids if none is an added token, because models
    with other vocabularies often still have GPT-2's 50256 in their configuration."""
    value = settings.get("eos_token_id")
    if value is not None:
        ids = value if isinstance(value, list) else [value]
        if not all(type(id) is int and 0 <= id < MAX_VOCAB_SIZE for id in ids):
            raise UserError(f"eos_token_id is {value!r}, which is not an id", "fix the model's generation_config.json")
        added_ids = [id for id in ids if id in added.values()]
        return [*added_ids, *(id for id in ids if id in pieces and id not in added_ids)] if added_ids else []
    word = content(settings.get("eos_token"))
    return [added[word]] if word in added else []


def content(token: Any) -> str:
    """Returns the text of a token, given as a string or as an object."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else ""


def _bos_id(values: Mapping[str, Any]) -> int | None:
    """Returns the id that the post-processor puts before a text. Ignores ``add_bos_token`` of
    ``tokenizer_config.json``, as transformers 5 does. Raises `UserError` for several ids."""
    for step in steps(values.get("post_processor"), "processors"):
        if step.get("type") in ("BertProcessing", "RobertaProcessing"):
            return int(step["cls"][1])
        if step.get("type") == "TemplateProcessing":
            prefix = takewhile(lambda piece: "SpecialToken" in piece, step["single"])
            ids = [id for piece in prefix for id in step["special_tokens"][piece["SpecialToken"]["id"]]["ids"]]
            if len(ids) > 1:
                raise UserError(
                    f"the tokenizer starts a text with {len(ids)} special tokens; only one is supported",
                    "keep one in the post_processor of its tokenizer.json",
                )
            return int(ids[0]) if ids else None
    return None


def _as_byte_bpe(library: LibraryTokenizer, added: Collection[str]) -> ByteBPE | None:
    """Returns a byte-level BPE if the file has GPT-2's pattern and the merges of `merging_pairs`, otherwise None."""
    if library.pattern != GPT2_PATTERN or library.values.get("normalizer"):
        return None
    model = library.values["model"]
    if len({bool(token.get("normalized")) for token in library.values["added_tokens"]}) > 1:
        return None  # The library finds normalized and other added tokens in separate passes.
    ranks = byte_ranks(model["vocab"], added)
    if ranks is None or any(bytes([byte]) not in ranks for byte in range(256)):
        return None
    pairs = merging_pairs(ranks)
    reaches_all = model.get("ignore_merges") or len(pairs) == sum(len(token) > 1 for token in ranks)
    return ByteBPE(GPT2_PATTERN, ranks) if reaches_all and listed_merges(model) == format_merges(pairs) else None


def byte_ranks(vocab: Mapping[str, int], added: Collection[str]) -> dict[bytes, int] | None:
    """Returns token bytes and ids, without ``added`` tokens. Returns None if a token is not spelled in GPT-2's byte
    characters."""
    try:
        ranks = {
            bytes(map(CHARACTER_BYTES.__getitem__, token)): id for token, id in vocab.items() if token not in added
        }
    except KeyError:
        return None
    return ranks if b"" not in ranks and all(type(id) is int for id in ranks.values()) else None


def listed_merges(model: Mapping[str, Any]) -> list[str]:
    """Returns the merges of a new or old ``tokenizer.json``, in the form of the old."""
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]


ENCODINGS_URL = "https://openaipublic.blob.core.windows.net/encodings/"
_FILES = {  # tiktoken encodings that use another encoding's file.
    "gpt2": "r50k_base",
    "p50k_edit": "p50k_base",
    "o200k_harmony": "o200k_base",
}


def named_tokenizers() -> list[str]:
    """Returns the names of built-in tokenizers: ``bytes``, ``gpt2`` and tiktoken's other encodings."""
    return list(dict.fromkeys(["bytes", "gpt2", *tiktoken.list_encoding_names()]))


def gpt2_tokenizer() -> Tokenizer:
    """Returns the tokenizer of GPT-2 and GPT-3 with 50,257 ids, tiktoken's ``r50k_base``."""
    return named_tokenizer("gpt2")


def named_tokenizer(name: str) -> Tokenizer:
    """Returns the built-in tokenizer called ``name``. Downloads its file once, into the user's cache or
    ``TIKTOKEN_CACHE_DIR``. If the download fails, raises `WorkError` with the file's address and local path."""
    if name == "bytes":
        return bytes_tokenizer()
    if name == "r50k_base":
        name = "gpt2"
    encoding = _load_encoding(name)
    pattern = encoding._pat_str.replace(r"\p{N}{1,3}+|", r"\p{N}{1,3}|")  # Oniguruma parses {1,3}+ as ({1,3})+.
    specials: dict[str, int] = {}
    for word, id in encoding._special_tokens.items():
        if word != END_OF_TEXT and id not in specials.values():  # o200k_harmony has two names for one id.
            specials[word] = id
    return Tokenizer(name, ByteBPE(pattern, dict(encoding._mergeable_ranks)), encoding.eot_token, specials=specials)


def _load_encoding(name: str) -> tiktoken.Encoding:
    file = _FILES.get(name, name)
    old_folder = os.environ.get("TIKTOKEN_CACHE_DIR")
    folder = old_folder or str(cache_dir() / "tiktoken")
    os.environ["TIKTOKEN_CACHE_DIR"] = folder  # tiktoken's default folder is shared by all users.
    try:
        return tiktoken.get_encoding("r50k_base" if name == "gpt2" else name)
    except (OSError, ValueError) as error:  # ValueError means a wrong hash. Network errors are OSErrors.
        url = f"{ENCODINGS_URL}{file}.tiktoken"
        path = os.path.join(folder, hashlib.sha1(url.encode()).hexdigest())
        subject = "GPT-2's vocabulary" if name == "gpt2" else f"the vocabulary {name}"
        raise WorkError(
            f"{subject} is not on this machine and could not be downloaded ({type(error).__name__})",
            f"on a machine with a network, download {url}; then put it at {path}",
        ) from None
    finally:
        if old_folder is None:
            del os.environ["TIKTOKEN_CACHE_DIR"]


def from_tiktoken(data: bytes, where: str) -> dict[bytes, int]:
    """Parses ranks in tiktoken's file format. Raises `UserError` naming an invalid line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise UserError(f"{where}, line {number}: expected a token in base64 and its rank") from None
    return ranks
