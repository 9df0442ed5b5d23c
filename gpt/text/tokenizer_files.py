"""Tokenizers in files: found by name or path, read, and saved, in our files and those of the tokenizers library."""

import codecs
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from gpt.config import MOST_IDS
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
from gpt.text.backends import BYTES, ByteBPE, Library, in_characters
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
NEVER = 2**63  # a rank
WHOLE, TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
_BESIDE = (TOKENIZER_CONFIG, SPECIAL_TOKENS, CHAT_TEMPLATE, "added_tokens.json")
_WHOLE_KEPT = (WHOLE, *_BESIDE)
KEPT = (*_WHOLE_KEPT, "vocab.json", "merges.txt")  # files of transformers' that are saved again as they are
RANKS = "tokenizer.tiktoken"
_LEVEL: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
NEW = "choose another path with --out"
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
                f"the folder {path} contains no tokenizer",
                f"a tokenizer is {RANKS} with gpt.json, tokenizer.json, or vocab.json and merges.txt",
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
    for name in _DESCRIBED:
        said = read_json(folder / name).get("tokenizer") if (folder / name).is_file() else None
        if said is not None and has_own(folder, said):
            return read_own(folder, said, str(folder / name))
    return read_transformers(folder)


def _in_file(path: Path) -> Tokenizer:
    if path.name == RANKS:
        return find_tokenizer(str(path.absolute().parent))
    if path.name == WHOLE and (found := read_transformers(path.absolute().parent)):
        return found
    if path.suffix == ".json":
        return from_tokenizer_json(read_json(path), str(path), {WHOLE: _json_bytes(path)})
    raise UserError(f"{path} is not a tokenizer", f"one is a tokenizer.json, or a folder with one or with {RANKS}")


def has_own(folder: Path, said: Any) -> bool:
    """Whether a folder has the file of a tokenizer of which `describe` ``said`` this."""
    return (folder / (WHOLE if isinstance(said, dict) and said.get("library") else RANKS)).is_file()


def read_own(folder: Path, said: Any, where: str) -> Tokenizer:
    """Reads a tokenizer: its files in ``folder``, and what `describe` ``said`` of it in the file ``where``.

    Raises `UserError` where one does not fit the other.
    """
    try:
        files = _kept(folder, [name for name in KEPT if name in said.get("files", [])])
        file = folder / (WHOLE if said.get("library") else RANKS)
        backend: ByteBPE | Library
        if said.get("library"):
            backend = Library(_json_bytes(file, parsed=True), read_json(file))
        else:
            ranks = from_tiktoken(read_regular(file, JSON_LIMIT), str(file))
            backend = ByteBPE(said["pattern"], ranks, bool(said.get("nfc", False)))
        tokenizer = Tokenizer(
            said["name"],
            backend,
            said["eot"],
            said["eot_token"],
            dict(said.get("specials", {})),
            dict(said.get("words", {})),
            said.get("bos"),
            frozenset(said.get("more_ends", [])),
            files,
        )
        fits = tokenizer.fingerprint == said["fingerprint"]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{where} does not describe its tokenizer") from None
    if not fits:
        raise UserError(f"{file} is not the tokenizer that {where} describes: the fingerprint differs")
    return tokenizer


def _kept(folder: Path, names: Iterable[str], parsed: str = "") -> dict[str, bytes]:
    """Reads those of transformers' files that are kept as they are; ``parsed`` was read as JSON before. Raises
    `UserError` for one that is too large or no JSON."""
    return {name: _json_bytes(folder / name, name == parsed) for name in names if (folder / name).is_file()}


def _json_bytes(path: Path, parsed: bool = False) -> bytes:
    if path.suffix == ".json" and not parsed:
        read_json(path)
    return read_regular(path, JSON_LIMIT).removeprefix(codecs.BOM_UTF8)


def read_transformers(folder: Path) -> Tokenizer | None:
    """Reads the tokenizer in a folder of transformers'; None where there is none."""
    whole, vocab, merges = folder / WHOLE, folder / "vocab.json", folder / "merges.txt"
    if whole.is_file():
        return from_tokenizer_json(read_json(whole), str(whole), _kept(folder, _WHOLE_KEPT, WHOLE), _settings(folder))
    if vocab.is_file() and merges.is_file():
        text = read_regular(merges, JSON_LIMIT).decode("utf-8-sig", "replace")
        return from_vocab_and_merges(read_json(vocab), text, str(vocab), _kept(folder, KEPT[1:]), _settings(folder))
    if (folder / "tokenizer.model").is_file():
        raise UserError(
            f"{folder} has only a tokenizer.model, which gpt does not support",
            f"convert it: AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})",
        )
    return None


def _completed(values: Mapping[str, Any], files: Mapping[str, bytes], where: str) -> Mapping[str, Any]:
    """Returns a ``tokenizer.json`` as transformers reads it: with the tokens that only the ``files`` beside it list or
    name, with end-of-text as a special token, and for GPT-2's and Qwen2's classes with the space before a text that
    tokenizer_config.json asks for."""
    config, names = (json.loads(files.get(name, b"{}")) for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS))
    vocab, listed = values["model"]["vocab"], values.get("added_tokens") or []
    vocab = {word: id for id, (word, _) in enumerate(vocab)} if isinstance(vocab, list) else vocab  # Unigram's
    added = {token["content"]: token["id"] for token in listed}
    size = 1 + max([-1, *vocab.values(), *added.values()])
    new = _tokens_beside(config, names, json.loads(files.get("added_tokens.json", b"{}")), vocab, added, size, where)
    if END_OF_TEXT in vocab and END_OF_TEXT not in [*added, *(token["content"] for token in new)]:
        new += _added_tokens({END_OF_TEXT: vocab[END_OF_TEXT]})
    values = {**values, "added_tokens": [*listed, *new]} if new else values
    if str(config.get("tokenizer_class")).removesuffix("Fast") in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        space = {"add_prefix_space": bool(config.get("add_prefix_space", False))}
        found = steps(values.get("pre_tokenizer"), "pretokenizers")
        changed = [{**step, **space} if step.get("type") == "ByteLevel" else step for step in found]
        if changed != found:
            values = {**values, "pre_tokenizer": {"type": "Sequence", "pretokenizers": changed}}
    return values


def _tokens_beside(
    config: Mapping[str, Any],
    names: Mapping[str, Any],
    more: Mapping[str, int],
    vocab: Mapping[str, int],
    added: Mapping[str, int],
    size: int,
    where: str,
) -> list[dict[str, Any]]:
    """Returns the tokens that the files beside a ``tokenizer.json`` list or name and that are not among those
    ``added``, as ``tokenizer.json`` lists them, with the ids that transformers gives them: those of ``vocab``, or the
    next ones from ``size`` on."""
    try:
        listed: dict[Any, Any] = config.get("added_tokens_decoder") or {}
        if not listed:
            config = {**config, **names}
            listed = {id: {"content": word} for word, id in more.items()}
        named = [config.get(f"{name}_token") for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            some = config.get(key)
            named += some.values() if isinstance(some, dict) else some if isinstance(some, list) else []
        special = dict.fromkeys(word for token in named if (word := content(token)))
        found: dict[str, Any] = {
            token["content"]: token for _, token in sorted(listed.items(), key=lambda item: int(item[0]))
        }
        new: list[dict[str, Any]] = []
        for word, token in (found | {word: {} for word in special if word not in found}).items():
            if word in added:
                continue
            id = vocab.get(word, size)
            size = max(size, id + 1)
            flags = {flag: bool(token.get(flag)) for flag in ("single_word", "lstrip", "rstrip")}
            is_special = bool(token.get("special")) or word in special
            normalized = bool(token.get("normalized", not is_special))
            new.append({"id": id, "content": word, **flags, "normalized": normalized, "special": is_special})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"the files next to {where} list no tokens: {_fault(error)}") from None
    return new


def _fault(error: Exception) -> str:
    """Returns what is wrong with JSON of another form, in words."""
    if isinstance(error, KeyError):
        return f"{error.args[0]!r} is missing"
    return f"a value has the wrong type: {error}"


def read_template(folder: Path) -> dict[str, bytes]:
    """Reads a chat template that a folder without a tokenizer has, as one of a tokenizer's files."""
    kept = _kept(folder, (CHAT_TEMPLATE, TOKENIZER_CONFIG))
    said = Tokenizer.template_in(kept)
    return {} if said is None else {CHAT_TEMPLATE: said.encode()}


def _settings(folder: Path) -> list[dict[str, Any]]:
    """Returns the configurations that say which tokens begin and end a text, each empty where there is none:
    generation_config.json, config.json, and tokenizer_config.json with what only special_tokens_map.json names."""
    names = ("generation_config.json", "config.json", SPECIAL_TOKENS, TOKENIZER_CONFIG)
    *models, words, config = [read_json(folder / name) if (folder / name).is_file() else {} for name in names]
    return [*models, {**words, **config}]


def tokenizer_files(tokenizer: Tokenizer, block_size: int | None = None) -> dict[str, bytes]:
    """Returns names and contents of the files that tiktoken, the tokenizers library and transformers read: those that
    were kept, or ones made for a vocabulary of ours."""
    ranks = {RANKS: to_tiktoken(tokenizer.backend.ranks)} if isinstance(tokenizer.backend, ByteBPE) else {}
    if tokenizer.keeps_files:
        return {**tokenizer.files, **ranks}
    return {
        WHOLE: json.dumps(to_tokenizer_json(tokenizer), ensure_ascii=False).encode(),
        TOKENIZER_CONFIG: to_json(to_tokenizer_config(tokenizer, block_size)),
        **ranks,
        **tokenizer.files,
    }


def with_specials(tokenizer: Tokenizer, words: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer that has further special tokens, whose ids are the next ones. Kept files say so too; those
    without a ``tokenizer.json`` are left out, since one is made then."""
    new = {word: id for id, word in enumerate(words, tokenizer.vocab_size)}
    files, backend = dict(tokenizer.files), tokenizer.backend
    if not new:
        return tokenizer
    if WHOLE in files:
        values = json.loads(files[WHOLE])
        values["added_tokens"] = [*(values.get("added_tokens") or []), *_added_tokens(new)]
        files[WHOLE] = json.dumps(values, ensure_ascii=False).encode()
        files.pop("added_tokens.json", None)  # of those before, and the file above has all
        config = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
        if "added_tokens_decoder" in config:
            config["added_tokens_decoder"] |= {
                str(token["id"]): {key: value for key, value in token.items() if key != "id"}
                for token in _added_tokens(new)
            }
            files[TOKENIZER_CONFIG] = to_json(config)
        backend = Library(files[WHOLE], values) if isinstance(backend, Library) else backend
    else:
        files = {}
    return replace(tokenizer, backend=backend, specials={**tokenizer.specials, **new}, files=files)


def _added_tokens(words: Mapping[str, int]) -> list[dict[str, Any]]:
    """Returns special tokens as ``tokenizer.json`` lists them."""
    return [
        {
            "id": id, "content": word, "single_word": False,
            "lstrip": False, "rstrip": False, "normalized": False, "special": True,
        }
        for word, id in sorted(words.items(), key=lambda item: item[1])
    ]  # fmt: skip


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


def merging_pairs(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Returns the pair that makes each token of two bytes or more, in the order of ranks: what is left of its bytes
    before its last merge. A token that its own bytes never become has none.

    tiktoken merges the neighbors that make the token of the lowest rank, the leftmost first. Two neighbors ``a`` and
    ``b`` about to be merged anywhere have seen the same merges between their ends as the bytes of ``a + b`` by
    themselves, so that no other pair ever makes this token: these pairs alone mean the same as all ranks.
    """
    pairs = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = [token[i : i + 1] for i in range(len(token))]
            joined = [ranks.get(a + b, NEVER) for a, b in pairwise(parts)]
            while len(parts) > 2 and (least := min(joined)) < NEVER:
                at = joined.index(least)
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
                del joined[at]
                for i in range(max(0, at - 1), min(at + 1, len(joined))):
                    joined[i] = ranks.get(parts[i] + parts[i + 1], NEVER)
            if len(parts) == 2:
                pairs.append((parts[0], parts[1]))
    return pairs


def to_tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns ``tokenizer.json``, with which the tokenizers library gives the same ids."""
    assert isinstance(tokenizer.backend, ByteBPE) and not tokenizer.backend.nfc
    ranks = tokenizer.backend.ranks
    by_rank = sorted(ranks.items(), key=lambda item: item[1])
    pre = _LEVEL
    if tokenizer.pattern != GPT2_PATTERN:
        split = {
            "type": "Split", "pattern": {"Regex": tokenizer.pattern}, "behavior": "Isolated", "invert": False,
        }  # fmt: skip
        pre = {"type": "Sequence", "pretokenizers": [split, _LEVEL | {"use_regex": False}]}
    pairs = merging_pairs(ranks)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokenizer.all_specials),
        "normalizer": None,
        "pre_tokenizer": pre,
        "post_processor": _LEVEL,
        "decoder": _LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            # As tiktoken does, where some token is reached by no merge: a whole piece that is a token is that token.
            "ignore_merges": len(pairs) < sum(len(token) > 1 for token in ranks),
            "vocab": {in_characters(token): rank for token, rank in by_rank} | tokenizer.all_specials,
            "merges": written(pairs),
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
        **({"additional_special_tokens": list(tokenizer.specials)} if tokenizer.specials else {}),
        **({} if block_size is None else {"model_max_length": block_size}),
    }


def from_tokenizer_json(
    values: Mapping[str, Any],
    where: str,
    files: Mapping[str, bytes] | None = None,
    settings: Sequence[Mapping[str, Any]] = ({}, {}, {}),
) -> Tokenizer:
    """Reads a ``tokenizer.json``: tiktoken runs one that says what `to_tokenizer_json` would, as ours and GPT-2's do,
    the tokenizers library any other. ``files`` are kept; ``settings``: see `_settings`.

    Raises `UserError` for one that the library cannot run either.
    """
    files = files or {}
    try:
        whole = _completed(values, files, where)
        data = files.get(WHOLE)
        if data is None or whole is not values:
            data = json.dumps(whole, ensure_ascii=False).encode()
        files = {**files, WHOLE: data} if files else {}
        added = [token for token in whole.get("added_tokens") or [] if token["content"]]
        specials = {token["content"]: token["id"] for token in added if token.get("special")}
        words = {token["content"]: token["id"] for token in added if not token.get("special")}
        library = Library(data, whole)
        backend = _as_ours(library, {*specials, *words}) or library
        if whole["model"].get("dropout"):
            raise UserError("a tokenizer with dropout gives different ids each time")
        tokenizer = _tokenizer(backend, specials, words, _bos(whole), settings, where, files)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{where} is not a tokenizers file: {_fault(error)}") from None
    # GPT-2's own tokenizer needs no files of others.
    gpt2 = tokenizer.fingerprint == GPT2_FINGERPRINT
    return replace(tokenizer, name="gpt2", files={}) if gpt2 else tokenizer


def from_vocab_and_merges(
    vocab: Mapping[str, int],
    merges_text: str,
    where: str,
    files: Mapping[str, bytes] | None = None,
    settings: Sequence[Mapping[str, Any]] = ({}, {}, {}),
) -> Tokenizer:
    """Reads the older pair ``vocab.json`` and ``merges.txt``, with GPT-2's pattern."""
    kind = settings[-1].get("tokenizer_class")
    if kind not in (None, "GPT2Tokenizer", "GPT2TokenizerFast"):
        hint = "create a tokenizer.json: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        raise UserError(f"{where} and merges.txt do not specify how {kind} splits text into words", hint)
    merges = [line for line in merges_text.split("\n") if line and not line.startswith("#version")]
    values = {
        "version": "1.0", "added_tokens": [], "pre_tokenizer": _LEVEL, "decoder": _LEVEL,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }  # fmt: skip
    return from_tokenizer_json(values, where, files, settings)


def _tokenizer(
    backend: ByteBPE | Library,
    specials: Mapping[str, int],
    words: Mapping[str, int],
    bos: int | None,
    settings: Sequence[Mapping[str, Any]],
    where: str,
    files: Mapping[str, bytes],
) -> Tokenizer:
    """Makes a tokenizer. A text ends with the tokens that the first of ``settings`` names that names any, of which
    ``<|endoftext|>`` is the main one if it is among them."""
    ends = next((found for each in settings if (found := _ends(each, {**specials, **words}, backend.pieces))), [])
    if not ends:
        if END_OF_TEXT not in specials and len(specials) != 1:
            hint = 'set "eos_token" in tokenizer_config.json'
            raise UserError(
                f"{where} has {len(specials)} special tokens, none of them {END_OF_TEXT}: which one ends a text?", hint
            )
        ends = [specials[END_OF_TEXT]] if END_OF_TEXT in specials else list(specials.values())
    eot = specials.get(END_OF_TEXT, -1)
    eot = eot if eot in ends else ends[0]
    special = {word: id for word, id in {**specials, **words}.items() if word in specials or id in ends}
    plain = {word: id for word, id in words.items() if word not in special}
    eot_token = next(word for word, id in special.items() if id == eot)
    others = {word: id for word, id in special.items() if word != eot_token}
    return Tokenizer("bpe", backend, eot, eot_token, others, plain, bos, frozenset(ends) - {eot}, files)


def _ends(settings: Mapping[str, Any], added: Mapping[str, int], pieces: Mapping[int, bytes]) -> list[int]:
    """Returns the ids that end a text, as a configuration names them, by ids or as a word: added tokens first. Without
    one of these the others are left out: GPT-2's 50256 stands in many configurations of other vocabularies."""
    said = settings.get("eos_token_id")
    if said is not None:
        ids = said if isinstance(said, list) else [said]
        if not all(type(id) is int and 0 <= id < MOST_IDS for id in ids):
            raise UserError(f"eos_token_id is {said!r}, which is not an id", "fix the model's generation_config.json")
        own = [id for id in ids if id in added.values()]
        return [*own, *(id for id in ids if id in pieces and id not in own)] if own else []
    word = content(settings.get("eos_token"))
    return [added[word]] if word in added else []


def content(token: Any) -> str:
    """Returns a token's text, which may stand alone or with the token's properties."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def _bos(values: Mapping[str, Any]) -> int | None:
    """Returns the token that the post-processor puts before a text. As in transformers 5, it decides, whatever
    ``add_bos_token`` in ``tokenizer_config.json`` says. Raises `UserError` where there are several such tokens."""
    for step in steps(values.get("post_processor"), "processors"):
        if step.get("type") in ("BertProcessing", "RobertaProcessing"):
            return int(step["cls"][1])
        if step.get("type") == "TemplateProcessing":
            before = takewhile(lambda piece: "SpecialToken" in piece, step["single"])
            ids = [id for piece in before for id in step["special_tokens"][piece["SpecialToken"]["id"]]["ids"]]
            if len(ids) > 1:
                raise UserError(
                    f"the tokenizer starts a text with {len(ids)} special tokens; only one is supported",
                    "keep one in the post_processor of its tokenizer.json",
                )
            return int(ids[0]) if ids else None
    return None


def _as_ours(library: Library, added: Collection[str]) -> ByteBPE | None:
    """Returns the byte-level BPE of a file that has GPT-2's pattern and the very merges that we would write for its
    vocabulary; else None."""
    if library.pattern != GPT2_PATTERN or library.values.get("normalizer"):
        return None
    model = library.values["model"]
    if len({bool(token.get("normalized")) for token in library.values["added_tokens"]}) > 1:
        return None  # some are found before others
    ranks = byte_ranks(model["vocab"], added)
    if ranks is None or any(bytes([byte]) not in ranks for byte in range(256)):
        return None
    pairs = merging_pairs(ranks)
    reached = model.get("ignore_merges") or len(pairs) == sum(len(token) > 1 for token in ranks)
    return ByteBPE(GPT2_PATTERN, ranks) if reached and listed_merges(model) == written(pairs) else None


def byte_ranks(vocab: Mapping[str, int], added: Collection[str]) -> dict[bytes, int] | None:
    """Returns the bytes and ids of tokens that are written in GPT-2's byte characters, those ``added`` left out; None
    where another one is not written so."""
    try:
        ranks = {bytes(map(BYTES.__getitem__, token)): id for token, id in vocab.items() if token not in added}
    except KeyError:
        return None
    return ranks if b"" not in ranks and all(type(id) is int for id in ranks.values()) else None


def listed_merges(model: Mapping[str, Any]) -> list[str]:
    """Returns the merges of a ``tokenizer.json``, older and newer, as ``merges.txt`` has them."""
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]


def written(pairs: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """Returns merges as ``merges.txt`` has them."""
    return [f"{in_characters(a)} {in_characters(b)}" for a, b in pairs]
