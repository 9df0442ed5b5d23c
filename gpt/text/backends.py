"""Two ways to turn text into ids: tiktoken runs our vocabularies and GPT-2's, the tokenizers library a tokenizer.json.

Neither knows which tokens begin or end a text; `gpt.text.tokenizer` does.
"""

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import tiktoken

from gpt.errors import UserError
from gpt.text import untrusted
from gpt.text.boundaries import DIGITS_PATTERN, GPT2_PATTERN, is_known, parts_of
from gpt.text.untrusted import steps

T = TypeVar("T")
Ids = npt.NDArray[np.uint32]
Int64s = npt.NDArray[np.int64]
HINT = "use another --tokenizer, or break up the long runs of one kind of character in the text"


# What stands between texts that tiktoken encodes in one call. It ends in another character than it begins with, so that
# no end of a text can be a part of it.
_BETWEEN, _BETWEEN_ID = "\U0010fffe|between|\U0010ffff", 2**31


@dataclass(frozen=True)
class ByteBPE:
    """A byte-level BPE that tiktoken runs. ``nfc``: text is normalized to NFC first, in runs of older versions of gpt
    that have Qwen's vocabulary."""

    pattern: str
    ranks: dict[bytes, int] = field(repr=False)  # a token's bytes → its id, which is also its rank in merging
    nfc: bool = False
    adds_space = False  # before a text
    added_pieces: ClassVar[dict[int, bytes]] = {}  # of added tokens, where they are not their words' bytes

    @cached_property
    def pieces(self) -> dict[int, bytes]:
        """The bytes of each token."""
        return {id: token for token, id in self.ranks.items()}

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        try:
            return tiktoken.Encoding(
                "gpt", pat_str=self.pattern, mergeable_ranks=self.ranks, special_tokens={_BETWEEN: _BETWEEN_ID}
            )
        except ValueError as error:
            raise UserError(f"the tokenizer's pattern is not valid: {error}") from None

    def encode(self, text: str, added: Mapping[str, int], specials: bool, continues: bool) -> Ids:
        """Returns the ids of ``text``.

        The words ``added`` get their ids wherever they stand; ``specials``: special tokens are among them.
        ``continues``: the text follows another one, so that no space is put before it.
        """
        words = sorted(added, key=len, reverse=True)
        split = re.split(f"({'|'.join(map(re.escape, words))})", text) if added else [text]
        ids = []
        for i, part in enumerate(split):
            if i % 2:
                ids.append(np.array([added[part]], np.uint32))
            elif part or len(split) == 1:
                ids += map(self._merge, parts_of(self._normalized(part), self.pattern))
        return np.concatenate(ids) if len(ids) != 1 else ids[0]

    def encode_all(self, texts: Sequence[str], added: Mapping[str, int]) -> list[Ids]:
        """Returns the ids of each text, in one call of tiktoken's for them all, during which other threads run."""
        joined = _BETWEEN.join(texts)
        if added or joined.count(_BETWEEN) >= len(texts):
            return [self.encode(text, added, False, False) for text in texts]
        ids = self._merge(self._normalized(joined), {_BETWEEN})
        places = np.flatnonzero(ids == _BETWEEN_ID)
        return [part[i > 0 :] for i, part in enumerate(np.split(ids, places))]

    def size(self, text: str) -> int:
        """Returns the number of bytes of all tokens of ``text``."""
        return len(self._normalized(text).encode("utf-8", "surrogatepass"))

    def _normalized(self, text: str) -> str:
        if not self.nfc:
            return text
        from tokenizers.normalizers import NFC

        return NFC().normalize_str(text)

    def _merge(self, text: str, allowed: AbstractSet[str] = frozenset()) -> Ids:
        encoding = self._encoding

        def work() -> Ids:
            return encoding.encode_to_numpy(text, allowed_special=allowed, disallowed_special=())

        return _run(work, len(text), not is_known(self.pattern), "the tokenizer's pattern")


def _run(work: Callable[[], T], size: int, is_risky: bool, what: str) -> T:
    """Returns ``work()``, a call of native code for ``size`` characters; a risky one may take long, or panic. Raises
    `UserError` where it fails."""
    try:
        if not is_risky and size <= untrusted.SHORT_IF_LINEAR:
            return work()
        alone = threading.current_thread() is threading.main_thread()  # others may want to write to stderr
        with untrusted.silent() if is_risky and alone else contextlib.nullcontext():
            return untrusted.timed(work, size, is_risky)
    except UserError:
        raise
    except BaseException as error:  # a panic of pyo3 is no Exception
        if not _is_panic(error) and not isinstance(error, Exception):
            raise
        raise UserError(f"{what} fails on a text of {size:,} characters: {error}", HINT) from None


Step = tuple[str, str, str]  # the type of a decoder, what it replaces, by what


@dataclass(frozen=True)
class Library:
    """A ``tokenizer.json`` that the tokenizers library runs: any model, normalizer and pre-tokenizer that it has."""

    data: bytes = field(repr=False)  # of the file
    values: Mapping[str, Any] = field(repr=False, compare=False)  # its contents

    @cached_property
    def pattern(self) -> str:
        """The pattern of a byte-level BPE if its form is known, so that long documents can be cut; else empty."""
        return _pattern(self.values) or ""

    @cached_property
    def adds_space(self) -> bool:
        """Whether decoding a text's ids begins with a space that the text does not have."""
        spaced = any(kind in ("Join", "WordPiece") for kind, _, _ in self._steps)
        return spaced or (
            self._continuing is not self._tokenizer
            and list(self.encode("a", {}, False, False)) != list(self.encode("a", {}, False, True))
        )

    @cached_property
    def _steps(self) -> list[Step]:
        return _decoders(self.values)

    @cached_property
    def _growth(self) -> int:
        return untrusted.check(self.values)

    @cached_property
    def _tokenizer(self) -> Any:
        return _made(self.data, self.values)

    @cached_property
    def _continuing(self) -> Any:
        if self.pattern:
            return self._tokenizer
        values = without_prefix(self.values)
        return _made(json.dumps(values).encode(), values)

    @cached_property
    def pieces(self) -> dict[int, bytes]:
        """The bytes of each token, added ones left out."""
        added = set(self._added)
        vocab = self._tokenizer.get_vocab(with_added_tokens=False)
        return {id: token_bytes(token, self._steps) for token, id in vocab.items() if id not in added}

    @property
    def _added(self) -> list[int]:
        return [token["id"] for token in self.values.get("added_tokens") or []]

    @cached_property
    def added_pieces(self) -> dict[int, bytes]:
        """The bytes of each added token. The decoder changes them as it does others: Gemma has runs of ▁ among them.
        But their characters are no bytes, also where those of others are."""
        words = {id: self._tokenizer.id_to_token(id) for id in self._added}
        kinds = [step for step in self._steps if step[0] != "ByteLevel"]
        return {id: token_bytes(word, kinds) for id, word in words.items() if word}

    def encode(self, text: str, added: Mapping[str, int], specials: bool, continues: bool) -> Ids:
        """Returns what `ByteBPE.encode` does. The library knows the words ``added`` itself."""
        tokenizer = self._continuing if continues else self._tokenizer
        if tokenizer.encode_special_tokens == specials:
            tokenizer.encode_special_tokens = not specials
        return self._ids(tokenizer, [text])[0]

    def encode_all(self, texts: Sequence[str], added: Mapping[str, int]) -> list[Ids]:
        """Returns the ids of each text, in one call of the library's for them all, during which other threads run."""
        return self._ids(self._tokenizer, texts)

    def _ids(self, tokenizer: Any, texts: Sequence[str]) -> list[Ids]:
        return [np.array(each.ids, np.uint32) for each in self._encoded(tokenizer, texts, tokenizer.encode_batch_fast)]

    def _encoded(self, tokenizer: Any, texts: Sequence[str], batch: Callable[..., list[Any]]) -> list[Any]:
        size = sum(map(len, texts))
        if size * self._growth > untrusted.MOST_CHARACTERS and len(texts) > 1:
            return [each for text in texts for each in self._encoded(tokenizer, [text], batch)]
        if size * self._growth > untrusted.MOST_CHARACTERS:
            raise UserError(
                f"a text of {size:,} characters is too long for a tokenizer that may lengthen it {self._growth} times",
                "split it into documents",
            )

        def work() -> list[Any]:
            if self._is_risky or size > untrusted.SHORT_IF_LINEAR:
                return batch(texts, add_special_tokens=False)
            # The library warns of a process that is forked after a batch.
            return [tokenizer.encode(text, add_special_tokens=False) for text in texts]

        return _run(work, size, self._is_risky, "the tokenizer")

    @cached_property
    def _is_risky(self) -> bool:
        """Whether time may grow with more than the length of a text: by regular expressions, at which the library may
        panic too, or by WordPiece, which tries all lengths of a word."""
        return not self.pattern and (b'"Regex"' in self.data or self.values["model"].get("type") == "WordPiece")

    def offsets(self, text: str) -> tuple[Int64s, Int64s]:
        """Returns the characters of ``text`` at which its tokens start and end, special tokens among them."""
        self._tokenizer.encode_special_tokens = False
        found = self._encoded(self._tokenizer, [text], self._tokenizer.encode_batch)[0].offsets
        starts, ends = np.array(found, np.int64).reshape(-1, 2).T
        return starts, ends


def _pattern(values: Mapping[str, Any]) -> str | None:
    """Returns the pattern of a byte-level BPE: ByteLevel's own, the same after digits are cut off one by one, or a
    Split of known form. None for any other, or where something else decides what a text is cut into."""
    model = values["model"]
    normalizers = [step.get("type") for step in steps(values.get("normalizer"), "normalizers")]
    found = steps(values.get("pre_tokenizer"), "pretokenizers")
    kinds = [step.get("type") for step in found]
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    flags = ("single_word", "lstrip", "rstrip", *(["normalized"] if normalizers else []))
    if (
        model.get("type", "BPE") != "BPE"
        or "merges" not in model
        or any(model.get(key) for key in odd)
        or normalizers not in ([], ["NFC"])
        or any(token.get(flag) for token in values.get("added_tokens") or [] for flag in flags)
        or kinds[-1:] != ["ByteLevel"]
        or found[-1].get("add_prefix_space", True)
    ):
        return None
    own = found[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and own:
        return GPT2_PATTERN
    if kinds == ["Digits", "ByteLevel"] and own and found[0].get("individual_digits"):
        return DIGITS_PATTERN
    if kinds == ["Split", "ByteLevel"] and not own:
        regex = found[0].get("pattern", {}).get("Regex")
        isolated = found[0].get("behavior") == "Isolated" and not found[0].get("invert")
        if isinstance(regex, str) and isolated and is_known(regex):
            return regex
    return None


def _made(data: bytes, values: Mapping[str, Any]) -> Any:
    from tokenizers import Tokenizer

    untrusted.check(values)
    try:
        with untrusted.silent():
            made = Tokenizer.from_buffer(data)
            made.no_truncation()
            made.no_padding()
            made.post_processor = None
            made.encode_special_tokens = True  # before threads share it
            return made
    except BaseException as error:  # a panic of pyo3 is no Exception
        if not _is_panic(error) and not isinstance(error, Exception):
            raise
        raise UserError(f"the tokenizers library cannot read the tokenizer.json: {error}") from None


def without_prefix(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a ``tokenizer.json`` that puts no space before a text."""
    found = dict(values)
    normalizers = steps(values.get("normalizer"), "normalizers")
    kept = [step for step in normalizers if step.get("type") != "Prepend"]
    found["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
    changed: list[dict[str, Any]] = []
    for step in steps(values.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "Metaspace":
            step = {key: value for key, value in step.items() if key != "add_prefix_space"}
            step["prepend_scheme"] = "never"
        elif step.get("type") == "ByteLevel":
            step = {**step, "add_prefix_space": False}
        changed.append(step)
    found["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": changed} if changed else None
    return found


def _is_panic(error: BaseException) -> bool:
    """Whether Rust code has panicked, which pyo3 raises as a BaseException."""
    return type(error).__name__ == "PanicException"


# What a WordPiece decoder replaces unless its ``cleanup`` is off, token by token.
_CLEANUP = {
    " .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'", " n't": "n't", " 'm": "'m", " do not": " don't",
    " 's": "'s", " 've": "'ve", " 're": "'re",
}  # fmt: skip


def _decoders(values: Mapping[str, Any]) -> list[Step]:
    """Returns what the decoder of a ``tokenizer.json`` does to each token; without one, tokens are joined by spaces.
    Raises `UserError` for a kind that works only on the whole text."""
    if values.get("decoder") is None:
        pre = [step.get("type") for step in steps(values.get("pre_tokenizer"), "pretokenizers")]
        return [("ByteLevel" if "ByteLevel" in pre else "Join", "", "")]
    found: list[Step] = []
    for step in steps(values["decoder"], "decoders"):
        kind = step.get("type")
        if kind in ("ByteLevel", "ByteFallback"):
            found.append((kind, "", ""))
        elif kind == "Metaspace":
            found.append(("Replace", step.get("replacement", "\u2581"), " "))
        elif kind == "WordPiece":
            found.append(("WordPiece", step.get("prefix", "##"), ""))
            found += [("Replace", old, new) for old, new in _CLEANUP.items() if step.get("cleanup", True)]
        elif kind == "Replace" and isinstance(step.get("pattern", {}).get("String"), str):
            found.append(("Replace", step["pattern"]["String"], step["content"]))
        elif kind not in ("Fuse", "Strip"):  # Strip takes the space before a whole text away; a piece keeps it
            raise UserError(f"the tokenizer's decoder {json.dumps(step)[:120]} is not supported")
    return found


_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def token_bytes(token: str, steps: Iterable[Step]) -> bytes:
    """Returns the bytes of a token as the library writes it."""
    for kind, old, new in steps:
        if kind == "Replace":
            token = token.replace(old, new)
        elif kind == "Join":
            token = f" {token}"
        elif kind == "WordPiece":
            token = token[len(old) :] if token.startswith(old) else f" {token}"
        elif kind == "ByteFallback" and (found := _BYTE.fullmatch(token)):
            return bytes([int(found[1], 16)])
        elif kind == "ByteLevel":
            try:
                return bytes(map(BYTES.__getitem__, token))
            except KeyError:  # a token that is no bytes is written as it is
                continue
    return token.encode("utf-8", "replace")


def byte_characters() -> dict[int, str]:
    """Returns the printable character that GPT-2's files write for each byte: itself if printable and no space,
    else the next free one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


_CHARACTERS = byte_characters()
BYTES = {character: byte for byte, character in _CHARACTERS.items()}


def in_characters(token: bytes) -> str:
    """Returns a token as GPT-2's files write it, a character per byte."""
    return token.decode("latin-1").translate(_CHARACTERS)
