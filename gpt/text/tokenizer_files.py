"""Finds, reads and saves tokenizers, in gpt's format and in Transformers formats."""

import codecs
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from gpt.config import MAX_VOCAB_SIZE
from gpt.errors import UserError, did_you_mean
from gpt.files import (
    JSON_LIMIT,
    atomic_folder,
    check_new,
    disk_errors,
    read_json,
    read_regular,
    reading,
    to_json,
    write_file,
)
from gpt.gguf_header import header, is_gguf
from gpt.text import gguf_vocabulary
from gpt.text.backends import BYTE_LEVEL, CHARACTER_BYTES, ByteBPE, LibraryTokenizer, added_token, to_gpt2_spelling
from gpt.text.boundaries import GPT2_PATTERN
from gpt.text.tokenizer import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    GPT2_FINGERPRINT,
    Tokenizer,
    describe,
    from_tiktoken,
    named_tokenizer,
    named_tokenizers,
    to_tiktoken,
)
from gpt.text.untrusted import steps

FORMAT = 1
_NO_RANK = 2**63  # Rank of a pair that never merges.
TOKENIZER_JSON, TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
_KEPT_WITH_TOKENIZER_JSON = (TOKENIZER_JSON, TOKENIZER_CONFIG, SPECIAL_TOKENS, CHAT_TEMPLATE, "added_tokens.json")
# Transformers files that are saved unchanged.
UNCHANGED_FILES = (*_KEPT_WITH_TOKENIZER_JSON, "vocab.json", "merges.txt")
RANKS = "tokenizer.tiktoken"
NEW_PATH_HINT = "choose another path with --out"
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
                f"a tokenizer is {RANKS} with gpt.json, tokenizer.json, or vocab.json and merges.txt",
            )
        return tokenizer
    if path.exists():
        return _read_file(path)
    if "/" in word or "\\" in word or "." in word:
        raise UserError(f"there is no tokenizer at {word}", "names: " + ", ".join(named_tokenizers()))
    raise UserError(f'there is no tokenizer "{word}"', did_you_mean(word, ["auto", *named_tokenizers()]))


def _candidate_folders(path: Path) -> list[Path]:
    """Returns the folders to search: the given folder, then the tokens and checkpoints of a run, newest first."""
    checkpoints = [entry for entry in path.iterdir() if re.fullmatch(r"step-\d+", entry.name)]
    return [path, path / "tokens", *sorted(checkpoints, key=lambda step: int(step.name[5:]), reverse=True)]


def _read_folder(folder: Path) -> Tokenizer | None:
    for name in _DESCRIPTION_FILES:
        description = read_json(folder / name).get("tokenizer") if (folder / name).is_file() else None
        if description is not None and has_described_tokenizer(folder, description):
            return read_described_tokenizer(folder, description, str(folder / name))
    return read_transformers(folder)


def _read_file(path: Path) -> Tokenizer:
    if path.name == RANKS:
        return find_tokenizer(str(path.absolute().parent))
    if path.name == TOKENIZER_JSON and (tokenizer := read_transformers(path.absolute().parent)):
        return tokenizer
    if path.suffix == ".json":
        return from_tokenizer_json(read_json(path), str(path), {TOKENIZER_JSON: _read_json_bytes(path)})
    if is_gguf(path) and (tokenizer := read_gguf(path)):
        return tokenizer
    raise UserError(f"{path} is not a tokenizer", f"one is a tokenizer.json, or a folder with one or with {RANKS}")


def has_described_tokenizer(folder: Path, description: Any) -> bool:
    """Whether ``folder`` contains the tokenizer file that ``description`` requires."""
    return (
        folder / (TOKENIZER_JSON if isinstance(description, dict) and description.get("library") else RANKS)
    ).is_file()


def read_described_tokenizer(folder: Path, description: Any, where: str) -> Tokenizer:
    """Reads a tokenizer from ``folder``. ``description``, from the file ``where``, is a result of `describe`. Raises
    `UserError` if the tokenizer does not match the description."""
    try:
        files = _read_kept(folder, [name for name in UNCHANGED_FILES if name in description.get("files", [])])
        file = folder / (TOKENIZER_JSON if description.get("library") else RANKS)
        backend: ByteBPE | LibraryTokenizer
        if description.get("library"):
            backend = LibraryTokenizer(_read_json_bytes(file, parsed=True), read_json(file))
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


def _read_kept(folder: Path, names: Iterable[str], parsed: str = "") -> dict[str, bytes]:
    """Reads the files to save unchanged. Raises `UserError` for a file that is too large or invalid JSON. ``parsed``
    names a file whose JSON is already checked."""
    return {name: _read_json_bytes(folder / name, name == parsed) for name in names if (folder / name).is_file()}


def _read_json_bytes(path: Path, parsed: bool = False) -> bytes:
    if path.suffix == ".json" and not parsed:
        read_json(path)
    return read_regular(path, JSON_LIMIT).removeprefix(codecs.BOM_UTF8)


def read_transformers(folder: Path) -> Tokenizer | None:
    """Reads the tokenizer of a Transformers folder, or returns None."""
    tokenizer_json, vocab, merges = folder / TOKENIZER_JSON, folder / "vocab.json", folder / "merges.txt"
    if tokenizer_json.is_file():
        return from_tokenizer_json(
            read_json(tokenizer_json),
            str(tokenizer_json),
            _read_kept(folder, _KEPT_WITH_TOKENIZER_JSON, TOKENIZER_JSON),
            _read_settings(folder),
        )
    if vocab.is_file() and merges.is_file():
        text = read_regular(merges, JSON_LIMIT).decode("utf-8-sig", "replace")
        return from_vocab_and_merges(
            read_json(vocab), text, str(vocab), _read_kept(folder, UNCHANGED_FILES[1:]), _read_settings(folder)
        )
    if (folder / "tokenizer.model").is_file():
        raise UserError(
            f"{folder} has only a tokenizer.model, which gpt does not support",
            f"convert it: AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})",
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
        new_tokens += _added_tokens({END_OF_TEXT: vocab[END_OF_TEXT]})
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


def read_template(folder: Path) -> dict[str, bytes]:
    """Returns the chat template of a folder without a tokenizer, in the form of `Tokenizer.files`."""
    files = _read_kept(folder, (CHAT_TEMPLATE, TOKENIZER_CONFIG))
    template = Tokenizer.template_in(files)
    return {} if template is None else {CHAT_TEMPLATE: template.encode()}


def _read_settings(folder: Path) -> list[dict[str, Any]]:
    """Returns the configurations that name the tokens that start and end a text: generation_config.json, config.json,
    and tokenizer_config.json merged with special_tokens_map.json. A missing file counts as empty."""
    names = ("generation_config.json", "config.json", SPECIAL_TOKENS, TOKENIZER_CONFIG)
    *models, words, config = [read_json(folder / name) if (folder / name).is_file() else {} for name in names]
    return [*models, {**words, **config}]


def tokenizer_files(tokenizer: Tokenizer, block_size: int | None = None) -> dict[str, bytes]:
    """Returns a tokenizer's files by name, for tiktoken, the tokenizers library and Transformers. Kept files are
    unchanged."""
    ranks = {RANKS: to_tiktoken(tokenizer.backend.ranks)} if isinstance(tokenizer.backend, ByteBPE) else {}
    if tokenizer.keeps_files:
        return {**tokenizer.files, **ranks}
    return {
        TOKENIZER_JSON: json.dumps(to_tokenizer_json(tokenizer), ensure_ascii=False).encode(),
        TOKENIZER_CONFIG: to_json(to_tokenizer_config(tokenizer, block_size)),
        **ranks,
        **tokenizer.files,
    }


def add_specials(tokenizer: Tokenizer, words: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer with further special tokens, which get the next ids. Updates a kept ``tokenizer.json``.
    If there is none, drops all kept files, so saving creates new ones."""
    new_ids = {word: id for id, word in enumerate(words, tokenizer.vocab_size)}
    files, backend = dict(tokenizer.files), tokenizer.backend
    if not new_ids:
        return tokenizer
    if TOKENIZER_JSON in files:
        values = json.loads(files[TOKENIZER_JSON])
        values["added_tokens"] = [*(values.get("added_tokens") or []), *_added_tokens(new_ids)]
        files[TOKENIZER_JSON] = json.dumps(values, ensure_ascii=False).encode()
        files.pop("added_tokens.json", None)  # tokenizer.json contains all added tokens.
        config = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
        if "added_tokens_decoder" in config:
            config["added_tokens_decoder"] |= {
                str(token["id"]): {key: value for key, value in token.items() if key != "id"}
                for token in _added_tokens(new_ids)
            }
            files[TOKENIZER_CONFIG] = to_json(config)
        backend = LibraryTokenizer(files[TOKENIZER_JSON], values) if isinstance(backend, LibraryTokenizer) else backend
    else:
        files = {}
    return replace(tokenizer, backend=backend, specials={**tokenizer.specials, **new_ids}, files=files)


def _added_tokens(words: Mapping[str, int]) -> list[dict[str, Any]]:
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
        "added_tokens": _added_tokens(tokenizer.all_specials),
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


def from_vocab_and_merges(
    vocab: Mapping[str, int],
    merges_text: str,
    where: str,
    files: Mapping[str, bytes] | None = None,
    settings: Sequence[Mapping[str, Any]] = ({}, {}, {}),
) -> Tokenizer:
    """Reads the older files ``vocab.json`` and ``merges.txt``, with GPT-2's pattern."""
    class_name = settings[-1].get("tokenizer_class")
    if class_name not in (None, "GPT2Tokenizer", "GPT2TokenizerFast"):
        hint = "create a tokenizer.json: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        raise UserError(f"{where} and merges.txt do not specify how {class_name} splits text into words", hint)
    merges = [line for line in merges_text.split("\n") if line and not line.startswith("#version")]
    values = {
        "version": "1.0", "added_tokens": [], "pre_tokenizer": BYTE_LEVEL, "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }  # fmt: skip
    return from_tokenizer_json(values, where, files, settings)


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
    """Returns the merges of a new or old ``tokenizer.json`` as lines of ``merges.txt``."""
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]


def format_merges(pairs: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """Returns merges as lines of ``merges.txt``."""
    return [f"{to_gpt2_spelling(a)} {to_gpt2_spelling(b)}" for a, b in pairs]
