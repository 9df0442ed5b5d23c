"""Tokenizer backends: tiktoken for built-in and trained vocabularies, the tokenizers library for ``tokenizer.json``.

`gpt.tokenizers.tokenizer` decides which tokens begin and end a text.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import tiktoken

from gpt.system.errors import UserError
from gpt.tokenizers import untrusted
from gpt.tokenizers.boundaries import DIGITS_PATTERN, GPT2_PATTERN, cut_text, is_known
from gpt.tokenizers.untrusted import steps

T = TypeVar("T")
Ids = npt.NDArray[np.uint32]
Int64s = npt.NDArray[np.int64]
HINT = "use another --tokenizer, or break up the long runs of one kind of character in the text"


# Separator between texts in one tiktoken call. Two separators cannot overlap, because the first character does not
# occur again in the separator.
_SEPARATOR, _SEPARATOR_ID = "\U0010fffe|between|\U0010ffff", 2**31


@dataclass(frozen=True)
class ByteBPE:
    """A byte-level BPE run by tiktoken."""

    pattern: str
    ranks: dict[bytes, int] = field(repr=False)  # Token bytes → id, which is also the merge rank.
    library = "tiktoken"
    adds_space = False
    added_pieces: ClassVar[dict[int, bytes]] = {}

    @cached_property
    def pieces(self) -> dict[int, bytes]:
        """The bytes of each token."""
        return {id: token for token, id in self.ranks.items()}

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        try:
            return tiktoken.Encoding(
                "gpt", pat_str=self.pattern, mergeable_ranks=self.ranks, special_tokens={_SEPARATOR: _SEPARATOR_ID}
            )
        except ValueError as error:
            raise UserError(f"the tokenizer's pattern is not valid: {error}") from None

    def encode(self, text: str, added: Mapping[str, int], specials: bool, continues: bool) -> Ids:
        """Returns the ids of ``text``. Each word of ``added`` becomes one id. With ``specials``, ``added`` includes
        special tokens. With ``continues``, adds no leading space."""
        words = sorted(added, key=len, reverse=True)
        segments = re.split(f"({'|'.join(map(re.escape, words))})", text) if added else [text]
        ids = []
        for i, segment in enumerate(segments):
            if i % 2:
                ids.append(np.array([added[segment]], np.uint32))
            elif segment or len(segments) == 1:
                ids += map(self._merge, cut_text(segment, self.pattern))
        return np.concatenate(ids) if len(ids) != 1 else ids[0]

    def encode_all(self, texts: Sequence[str], added: Mapping[str, int]) -> list[Ids]:
        """Returns the ids of each text. Without ``added`` words, a single tiktoken call encodes all texts, without the
        GIL."""
        joined_text = _SEPARATOR.join(texts)
        if added or joined_text.count(_SEPARATOR) >= len(texts):
            return [self.encode(text, added, False, False) for text in texts]
        ids = self._merge(joined_text, {_SEPARATOR})
        positions = np.flatnonzero(ids == _SEPARATOR_ID)
        return [part[i > 0 :] for i, part in enumerate(np.split(ids, positions))]

    def size(self, text: str) -> int:
        """Returns the total size of the tokens of ``text`` in bytes."""
        return len(text.encode("utf-8", "surrogatepass"))

    def _merge(self, text: str, allowed: AbstractSet[str] = frozenset()) -> Ids:
        encoding = self._encoding

        def work() -> Ids:
            return encoding.encode_to_numpy(text, allowed_special=allowed, disallowed_special=())

        return _call_native(work, len(text), not is_known(self.pattern), "the tokenizer's pattern")


def _call_native(work: Callable[[], T], size: int, is_risky: bool, component: str) -> T:
    """Calls native code, which can be slow or panic if ``is_risky``. Raises `UserError` if ``work`` fails."""
    try:
        if not is_risky and size <= untrusted.MAX_UNTIMED_IF_LINEAR:
            return work()
        return untrusted.run_with_timeout(work, size, is_risky)
    except UserError:
        raise
    except BaseException as error:
        if not _is_panic(error) and not isinstance(error, Exception):
            raise
        raise UserError(f"{component} fails on a text of {size:,} characters: {error}", HINT) from None


BYTE_LEVEL: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
Step = tuple[str, str, str]  # (decoder type, text to replace, replacement)


@dataclass(frozen=True)
class LibraryTokenizer:
    """A ``tokenizer.json`` run by the tokenizers library, with any model, normalizer and pre-tokenizer."""

    data: bytes = field(repr=False)
    values: Mapping[str, Any] = field(repr=False, compare=False)  # The parsed file.
    library = "the tokenizers library"

    @cached_property
    def pattern(self) -> str:
        """The pattern of a byte-level BPE, or "" if `gpt.tokenizers.boundaries` does not support it."""
        return _find_pattern(self.values) or ""

    @cached_property
    def adds_space(self) -> bool:
        """Whether decoding adds a leading space to the text."""
        return list(self.encode("a", {}, False, False)) != list(self.encode("a", {}, False, True))

    @cached_property
    def _decoder_steps(self) -> list[Step]:
        return _read_decoder(self.values)

    @cached_property
    def _tokenizer(self) -> Any:
        return _load_tokenizer(self.data, self.values)

    @cached_property
    def _continuation_tokenizer(self) -> Any:
        if self.pattern:
            return self._tokenizer
        values = without_prefix(self.values)
        return _load_tokenizer(json.dumps(values).encode(), values)

    @cached_property
    def pieces(self) -> dict[int, bytes]:
        """The bytes of each token, except added tokens."""
        added = set(self._added_ids)
        vocab = self._tokenizer.get_vocab(with_added_tokens=False)
        return {id: token_bytes(token, self._decoder_steps) for token, id in vocab.items() if id not in added}

    @property
    def _added_ids(self) -> list[int]:
        return [token["id"] for token in self.values.get("added_tokens") or []]

    @cached_property
    def added_pieces(self) -> dict[int, bytes]:
        """The bytes of each added token. All decoder steps except ByteLevel apply, because Gemma has added
        tokens that are runs of ▁."""
        words = {id: self._tokenizer.id_to_token(id) for id in self._added_ids}
        other_steps = [step for step in self._decoder_steps if step[0] != "ByteLevel"]
        return {id: token_bytes(word, other_steps) for id, word in words.items() if word}

    def encode(self, text: str, added: Mapping[str, int], specials: bool, continues: bool) -> Ids:
        """Like `ByteBPE.encode`, but ignores ``added``, which the library reads from its file."""
        tokenizer = self._continuation_tokenizer if continues else self._tokenizer
        if tokenizer.encode_special_tokens == specials:
            tokenizer.encode_special_tokens = not specials
        return self._encode_to_ids(tokenizer, [text])[0]

    def encode_all(self, texts: Sequence[str], added: Mapping[str, int]) -> list[Ids]:
        """Returns the ids of each text, in one library call without the GIL."""
        return self._encode_to_ids(self._tokenizer, texts)

    def _encode_to_ids(self, tokenizer: Any, texts: Sequence[str]) -> list[Ids]:
        return [
            np.array(encoding.ids, np.uint32)
            for encoding in self._encode_batch(tokenizer, texts, tokenizer.encode_batch_fast)
        ]

    def _encode_batch(self, tokenizer: Any, texts: Sequence[str], encode_batch: Callable[..., list[Any]]) -> list[Any]:
        work = partial(encode_batch, texts, add_special_tokens=False)
        return _call_native(work, sum(map(len, texts)), self._is_risky, "the tokenizer")

    @cached_property
    def _is_risky(self) -> bool:
        """Whether tokenizing can take superlinear time or panic. WordPiece can be slow; a regular expression can be
        slow or panic."""
        return not self.pattern and (b'"Regex"' in self.data or self.values["model"].get("type") == "WordPiece")

    def offsets(self, text: str) -> tuple[Int64s, Int64s]:
        """Returns the start and end of each token of ``text``, in characters. Recognizes special tokens."""
        self._tokenizer.encode_special_tokens = False
        spans = self._encode_batch(self._tokenizer, [text], self._tokenizer.encode_batch)[0].offsets
        starts, ends = np.array(spans, np.int64).reshape(-1, 2).T
        return starts, ends


def _find_pattern(values: Mapping[str, Any]) -> str | None:
    """Returns the pattern of a byte-level BPE, or None if the pattern is unknown or other settings affect
    tokenization."""
    model = values["model"]
    normalizers = [step.get("type") for step in steps(values.get("normalizer"), "normalizers")]
    pre_tokenizers = steps(values.get("pre_tokenizer"), "pretokenizers")
    kinds = [step.get("type") for step in pre_tokenizers]
    unsupported_options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    unsupported_flags = ("single_word", "lstrip", "rstrip", *(["normalized"] if normalizers else []))
    if (
        model.get("type", "BPE") != "BPE"
        or "merges" not in model
        or any(model.get(key) for key in unsupported_options)
        or normalizers not in ([], ["NFC"])
        or any(token.get(flag) for token in values.get("added_tokens") or [] for flag in unsupported_flags)
        or kinds[-1:] != ["ByteLevel"]
        or pre_tokenizers[-1].get("add_prefix_space", True)
    ):
        return None
    uses_gpt2_pattern = pre_tokenizers[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and uses_gpt2_pattern:
        return GPT2_PATTERN
    if kinds == ["Digits", "ByteLevel"] and uses_gpt2_pattern and pre_tokenizers[0].get("individual_digits"):
        return DIGITS_PATTERN
    if kinds == ["Split", "ByteLevel"] and not uses_gpt2_pattern:
        regex = pre_tokenizers[0].get("pattern", {}).get("Regex")
        is_isolated = pre_tokenizers[0].get("behavior") == "Isolated" and not pre_tokenizers[0].get("invert")
        if isinstance(regex, str) and is_isolated and is_known(regex):
            return regex
    return None


def _load_tokenizer(data: bytes, values: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer

    # `gpt.corpus.tokenize` has threads of its own, and the library would print a warning if the process forks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    untrusted.check(values)
    try:
        tokenizer = Tokenizer.from_buffer(data)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.post_processor = None
        tokenizer.encode_special_tokens = True  # Set before threads share the tokenizer.
        return tokenizer
    except BaseException as error:
        if not _is_panic(error) and not isinstance(error, Exception):
            raise
        raise UserError(f"the tokenizers library cannot read the tokenizer.json: {error}") from None


def without_prefix(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a ``tokenizer.json`` that adds no leading space."""
    result = dict(values)
    normalizers = steps(values.get("normalizer"), "normalizers")
    other_normalizers = [step for step in normalizers if step.get("type") != "Prepend"]
    result["normalizer"] = {"type": "Sequence", "normalizers": other_normalizers} if other_normalizers else None
    pre_tokenizers: list[dict[str, Any]] = []
    for step in steps(values.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "Metaspace":
            step = {key: value for key, value in step.items() if key != "add_prefix_space"}
            step["prepend_scheme"] = "never"
        elif step.get("type") == "ByteLevel":
            step = {**step, "add_prefix_space": False}
        pre_tokenizers.append(step)
    result["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": pre_tokenizers} if pre_tokenizers else None
    return result


def _is_panic(error: BaseException) -> bool:
    """Whether ``error`` is a Rust panic, which pyo3 raises as a BaseException."""
    return type(error).__name__ == "PanicException"


def _read_decoder(values: Mapping[str, Any]) -> list[Step]:
    """Returns the decoder steps. A file without a decoder needs a ByteLevel pre-tokenizer. Raises `UserError` for
    unsupported steps."""
    pre_tokenizers = [step.get("type") for step in steps(values.get("pre_tokenizer"), "pretokenizers")]
    if values.get("decoder") is None and "ByteLevel" in pre_tokenizers:
        return [("ByteLevel", "", "")]
    result: list[Step] = []
    for step in steps(values.get("decoder") or {"type": None}, "decoders"):
        kind = step.get("type")
        if kind in ("ByteLevel", "ByteFallback"):
            result.append((kind, "", ""))
        elif kind == "Metaspace":
            result.append(("Replace", step.get("replacement", "\u2581"), " "))
        elif kind == "Replace" and isinstance(step.get("pattern", {}).get("String"), str):
            result.append(("Replace", step["pattern"]["String"], step["content"]))
        elif kind not in ("Fuse", "Strip"):  # Strip only removes a space before the whole text.
            raise UserError(f"the decoder {json.dumps(step)[:120]} is not supported", "use another --tokenizer")
    return result


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def token_bytes(token: str, steps: Iterable[Step]) -> bytes:
    """Decodes a token of the library's vocabulary to bytes."""
    for kind, old, new in steps:
        if kind == "Replace":
            token = token.replace(old, new)
        elif kind == "ByteFallback" and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        elif kind == "ByteLevel":
            try:
                return bytes(map(CHARACTER_BYTES.__getitem__, token))
            except KeyError:  # The token has characters that are not byte characters.
                continue
    return token.encode("utf-8", "replace")


def added_token(id: int, word: str, special: bool = True) -> dict[str, Any]:
    """Returns an added token as ``tokenizer.json`` lists it."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": word, **flags, "special": special}


def byte_characters() -> dict[int, str]:
    """Returns GPT-2's byte characters. Visible Latin-1 characters stay; other bytes map to U+0100 onward."""
    visible_bytes = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other_bytes = [byte for byte in range(256) if byte not in visible_bytes]
    return {byte: chr(byte) for byte in visible_bytes} | {byte: chr(0x100 + i) for i, byte in enumerate(other_bytes)}


_BYTE_CHARACTERS = byte_characters()
CHARACTER_BYTES = {character: byte for byte, character in _BYTE_CHARACTERS.items()}


def to_gpt2_spelling(token: bytes) -> str:
    """Spells a token as in GPT-2's files, with one character per byte."""
    return token.decode("latin-1").translate(_BYTE_CHARACTERS)
