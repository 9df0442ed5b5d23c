"""Tokenizers: GPT-2's vocabulary, plain bytes, a trained BPE, or the vocabulary of a Transformers model.

An end-of-text token precedes each document. Inside a document, the token's characters are ordinary text.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from gpt.config.model import MAX_VOCAB_SIZE
from gpt.system.errors import UserError
from gpt.tokenizers.backends import ByteBPE, Ids, LibraryTokenizer
from gpt.tokenizers.boundaries import GPT2_PATTERN, SPACES

END_OF_TEXT = "<|endoftext|>"
CHAT_TEMPLATE = "chat_template.jinja"
GPT2_FINGERPRINT = "278c76e956a0d28755e8cb07656cc21c373520d95c7af18e9db55b9938d6c5fb"
MAX_LEARNED_LENGTH = (
    64  # Maximum characters of a trained token. Longer tokens would be lines of dashes, and slow to merge.
)

# Runs longer than `MAX_LEARNED_LENGTH`. The lookbehind allows a match only at the start of a run, for linear time.
_LONG_RUNS = [
    re.compile(rf"(?<!{kind}){kind}{{{MAX_LEARNED_LENGTH + 1},}}")
    for kind in (r"[^\W_]", rf"[^a-zA-Z0-9{SPACES}]", f"[{SPACES}]")
]


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary with its encoder and the tokens that start and end a text."""

    name: str
    backend: ByteBPE | LibraryTokenizer
    eot: int
    eot_token: str = END_OF_TEXT
    specials: Mapping[str, int] = field(default_factory=dict)  # Further special tokens. Merging never produces them.
    words: Mapping[str, int] = field(default_factory=dict)  # Added tokens that are recognized in any text.
    bos: int | None = None  # Id that starts a text, if the family has a BOS token.
    more_ends: frozenset[int] = frozenset()  # Further ids that end a text.
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # Transformers files, saved unchanged.
    limit: int | None = None  # Vocabulary size of the model, if smaller than the tokenizer's.

    def __post_init__(self) -> None:
        ranks = self.backend.ranks if isinstance(self.backend, ByteBPE) else None
        missing_count = sum(bytes([byte]) not in ranks for byte in range(256)) if ranks is not None else 0
        if missing_count:
            raise UserError(f"the tokenizer {self.name} has no token for {missing_count} of the 256 bytes")
        words = [self.eot_token, *self.specials, *self.words]
        if len(set(words)) != len(words) or "" in words:
            raise UserError(f"the special tokens of the tokenizer {self.name} are not all different")
        ids = [*self.backend.pieces, *self._added_tokens.values()]
        if {*map(type, ids)} != {int} or min(ids) < 0 or max(ids) >= MAX_VOCAB_SIZE:
            raise UserError(f"the ids of the tokenizer {self.name} are not numbers from 0 to {MAX_VOCAB_SIZE:,}")
        count = len(self._added_tokens) + len(self.backend.pieces if ranks is None else ranks)
        if len(set(ids)) != count:
            raise UserError(f"the tokenizer {self.name} has {count:,} tokens and {len(set(ids)):,} ids")
        for id in (*self.ends, *([] if self.bos is None else [self.bos])):
            if id not in self._token_bytes:
                raise UserError(f"the tokenizer {self.name} has no token {id}, which starts or ends a text")

    @property
    def _added_tokens(self) -> dict[str, int]:
        return {**self.all_specials, **self.words}

    @property
    def pattern(self) -> str:
        """The regular expression that splits a text before merging, or "" if unknown."""
        return self.backend.pattern

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a text."""
        return self.more_ends | {self.eot}

    @property
    def opening(self) -> list[int]:
        """The ids before a document in a stream: end-of-text, then BOS if there is one."""
        return [self.eot] if self.bos is None else [self.eot, self.bos]

    def special_pattern(self) -> re.Pattern[str]:
        """Returns a pattern that matches the special tokens."""
        return re.compile("|".join(map(re.escape, sorted(self.all_specials, key=len, reverse=True))))

    @cached_property
    def all_specials(self) -> dict[str, int]:
        """All special tokens with their ids, including end-of-text."""
        return {self.eot_token: self.eot, **self.specials}

    @cached_property
    def _token_bytes(self) -> dict[int, bytes]:
        added = {id: word.encode("utf-8", "replace") for word, id in self._added_tokens.items()}
        return {**self.backend.pieces, **added, **self.backend.added_pieces}

    @cached_property
    def vocab_size(self) -> int:
        """The highest id plus one, special tokens included."""
        return 1 + max(self._token_bytes)

    @property
    def usable(self) -> int:
        """The number of ids that the model accepts."""
        return min(self.vocab_size, self.limit or self.vocab_size)

    @property
    def known(self) -> list[int]:
        """The ids that have a token and that the model accepts."""
        return sorted(id for id in self._token_bytes if id < self.usable)

    def for_model(self, ids: int) -> "Tokenizer":
        """Returns the tokenizer for a model with ``ids`` ids. Encoding a text that needs a missing id then raises
        `UserError`. Raises `UserError` if the id that starts or ends a text is missing."""
        if self.vocab_size <= ids:
            return replace(self, limit=None) if self.limit else self
        if max(self.eot, self.bos or 0) >= ids:
            raise UserError(
                f"the tokenizer has {self.vocab_size:,} ids, the model {ids:,}, without the one that starts or ends "
                "a text",
                "put the model's own tokenizer next to it",
            )
        return replace(self, limit=ids, more_ends=frozenset(id for id in self.more_ends if id < ids))

    def _check_limit(self, ids: Ids) -> Ids:
        if self.limit is not None and len(ids) and (highest := int(ids.max())) >= self.limit:
            word = self._token_bytes[highest].decode("utf-8", "replace")
            raise UserError(
                f'the text contains "{word}", token {highest:,}, but the model has {self.limit:,} ids',
                "remove it: the model was never trained on it",
            )
        return ids

    @cached_property
    def chat_template(self) -> str | None:
        """The chat template (Jinja), if the family has one."""
        return self.template_in(self.files)

    @staticmethod
    def template_in(files: Mapping[str, bytes]) -> str | None:
        """Returns the chat template in Transformers files, if any."""
        if CHAT_TEMPLATE in files:
            return files[CHAT_TEMPLATE].decode("utf-8", "replace")
        template = json.loads(files.get("tokenizer_config.json", b"{}")).get("chat_template")
        if isinstance(template, list):
            templates = [item for item in template if isinstance(item, dict)]
            template = next((item.get("template") for item in templates if item.get("name") == "default"), None)
        return template if isinstance(template, str) else None

    def encode(self, text: str, specials: bool = False, continues: bool = False) -> Ids:
        """Returns the ids of ``text``, uint32. Special tokens are ordinary text without ``specials``. With
        ``continues``, prepends no space."""
        return self._check_limit(
            self.backend.encode(text, self._added_tokens if specials else self.words, specials, continues)
        )

    def encode_marked(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Returns the ids of ``text`` with special tokens, and a mask of the ids that overlap the character
        ``spans``."""
        ids = self.encode(text, specials=True)
        if isinstance(self.backend, LibraryTokenizer):
            starts, ends = self.backend.offsets(text)
        else:
            ends = np.cumsum([len(self._token_bytes[id]) for id in ids.tolist()], dtype=np.int64)
            starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
            spans = [(self.backend.size(text[:start]), self.backend.size(text[:end])) for start, end in spans]
        mask = np.zeros(len(ids), np.bool_)
        for start, end in spans:
            mask |= (starts < end) & (ends > start)
        return ids, mask

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        """Returns the ids of each text, without special tokens."""
        return [self._check_limit(ids) for ids in self.backend.encode_all(texts, self.words)]

    def prompt(self, text: str) -> list[int]:
        """Returns the ids of a prompt, starting with BOS if there is one. An empty prompt without BOS becomes
        end-of-text. Special tokens are ordinary text unless the tokenizer has Transformers files."""
        ids: list[int] = self.encode(text, specials=bool(self.files)).tolist()
        return ([] if self.bos is None else [self.bos]) + ids or [self.eot]

    def document(self, text: str) -> Ids:
        """Returns the ids of a document, without the preceding end-of-text."""
        ids = self.encode(text)
        return ids if self.bos is None else np.concatenate([np.array([self.bos], np.uint32), ids])

    def document_bytes(self, ids: Sequence[int]) -> bytes:
        """Returns the bytes of a document's first ids, without BOS or an added space."""
        if self.bos is not None and list(ids[:1]) == [self.bos]:
            ids = ids[1:]
        return self.decode_bytes(ids).removeprefix(b" " if self.backend.adds_space else b"")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Returns the bytes of ``ids``. Skips ids without a token, because a model can have more ids than the
        tokenizer."""
        try:
            return b"".join(map(self._token_bytes.__getitem__, ids))
        except KeyError:
            return b"".join(self._token_bytes.get(id, b"") for id in ids)

    @cached_property
    def _max_token_size(self) -> int:
        return max(map(len, self._token_bytes.values()))

    def estimate_min_tokens(self, text: str) -> int:
        """Returns a lower bound on the number of tokens of ``text``, without tokenizing. The bound is 0 for a
        ``tokenizer.json``, because its normalizer can shorten a text by any amount."""
        return 0 if isinstance(self.backend, LibraryTokenizer) else -(-self.backend.size(text) // self._max_token_size)

    def check(self, ids: Sequence[int]) -> None:
        """Raises `UserError` for an id outside the vocabulary."""
        for id in ids:
            if not 0 <= id < self.usable:
                raise UserError(f"id {id} is outside the vocabulary of {self.usable:,}")

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ``ids``. Invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    @cached_property
    def fingerprint(self) -> str:
        """A sha256 of everything that determines the ids of a text."""
        library = isinstance(self.backend, LibraryTokenizer)  # The library's file contains the pattern.
        digest = hashlib.sha256(f"{'' if library else self.pattern}\0{self.eot}\0{self.eot_token}\0".encode())
        digest.update(
            self.backend.data if isinstance(self.backend, LibraryTokenizer) else to_tiktoken(self.backend.ranks)
        )
        if self.specials:
            digest.update(json.dumps(sorted(self.specials.items())).encode())
        optional = _optional_fields(self)
        if optional:
            digest.update(json.dumps(optional, sort_keys=True).encode())
        return digest.hexdigest()


def _optional_fields(tokenizer: Tokenizer) -> dict[str, Any]:
    fields = {"words": dict(tokenizer.words), "bos": tokenizer.bos}
    return {key: value for key, value in fields.items() if value not in (None, {})}


def _split_long_runs(text: str) -> Iterator[str]:
    """Yields the text in parts, with runs longer than `MAX_LEARNED_LENGTH` split."""
    runs = (run.span() for kind in _LONG_RUNS for run in kind.finditer(text))
    cuts = {cut for start, end in runs for cut in range(start + MAX_LEARNED_LENGTH, end, MAX_LEARNED_LENGTH)}
    for start, end in pairwise([0, *sorted(cuts), len(text)]):
        yield text[start:end]


def bytes_tokenizer() -> Tokenizer:
    """Returns the byte tokenizer: 256 bytes and end-of-text."""
    return Tokenizer("bytes", ByteBPE(GPT2_PATTERN, {bytes([byte]): byte for byte in range(256)}), 256)


def train_tokenizer(texts: Iterable[str], vocab_size: int, specials: Sequence[str] = ()) -> Tokenizer:
    """Trains a byte-level BPE with ``vocab_size`` ids on ``texts`` (Sennrich et al. 2016). The last ids are end-of-text
    and ``specials``, in order. Raises `UserError` if the texts have too few pairs to merge."""
    min_size = 257 + len(specials)
    if vocab_size < min_size:
        extra = f" and {len(specials)} more" if specials else ""
        raise UserError(
            f"vocab-size is {vocab_size}; it must be at least {min_size}: the 256 bytes and end-of-text{extra}"
        )
    tokenizer = train_tokenizer_up_to(texts, vocab_size, specials)
    if tokenizer.vocab_size < vocab_size:
        raise UserError(
            f"the text supports a vocabulary of at most {tokenizer.vocab_size:,} ids, not {vocab_size:,}",
            f"use --vocab-size {tokenizer.vocab_size} or less, or more text",
        )
    return tokenizer


def train_tokenizer_up_to(texts: Iterable[str], vocab_size: int, specials: Sequence[str] = ()) -> Tokenizer:
    """Trains a tokenizer like `train_tokenizer`, but with fewer ids if the texts have too few pairs."""
    import rustbpe  # Only training needs rustbpe.

    check_specials(specials)
    trainer = rustbpe.Tokenizer()
    pieces = (piece for text in texts for piece in _split_long_runs(text))
    trainer.train_from_iterator(pieces, max(256, vocab_size - 1 - len(specials)), pattern=GPT2_PATTERN)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    special_ids = {special: id for id, special in enumerate(specials, len(ranks) + 1)}
    return Tokenizer("bpe", ByteBPE(GPT2_PATTERN, ranks), len(ranks), specials=special_ids)


def check_specials(specials: Sequence[str]) -> None:
    """Raises `UserError` for a special token that is empty, repeated or not UTF-8."""
    for special in specials:
        if not special:
            raise UserError("a special token is empty")
        if special == END_OF_TEXT or list(specials).count(special) > 1:
            raise UserError(f'the special token "{special}" already exists')
        try:
            special.encode()
        except UnicodeEncodeError:  # Invalid UTF-8 on the command line.
            raise UserError(f"the special token {special!r} is not UTF-8", "give it in UTF-8") from None


def to_tiktoken(ranks: dict[bytes, int]) -> bytes:
    """Returns ranks in tiktoken's file format: lines with a token in base64 and its rank."""
    sorted_ranks = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(token) + b" " + str(rank).encode() + b"\n" for token, rank in sorted_ranks)


def auto_vocab_size(n_bytes: int) -> int:
    """Returns a vocabulary size that keeps every id frequent in ``n_bytes`` of text (benchmarks/defaults.md)."""
    for size, bound in ((512, 300_000), (1024, 2_000_000), (2048, 10_000_000), (4096, 50_000_000), (8192, 500_000_000)):
        if n_bytes < bound:
            return size
    return 16_384


def describe(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns a tokenizer's JSON description, without its ranks."""
    library = isinstance(tokenizer.backend, LibraryTokenizer)
    return {
        "name": tokenizer.name,
        "pattern": tokenizer.pattern,
        "eot": tokenizer.eot,
        "eot_token": tokenizer.eot_token,
        "specials": dict(tokenizer.specials),
        "fingerprint": tokenizer.fingerprint,
        **({"library": True} if library else {}),
        **_optional_fields(tokenizer),
        **({"more_ends": sorted(tokenizer.more_ends)} if tokenizer.more_ends else {}),
        **({"files": sorted(tokenizer.files)} if tokenizer.files else {}),
    }
