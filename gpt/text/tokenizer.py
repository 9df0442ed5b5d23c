"""Text ↔ ids: GPT-2's vocabulary, plain bytes, a learnt one, or that of a model of transformers.

End-of-text stands before each document, and is ordinary text when a document contains it.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import tiktoken

from gpt.config import MOST_IDS
from gpt.errors import UserError, WorkError
from gpt.files import cache_dir
from gpt.text.backends import ByteBPE, Ids, Library
from gpt.text.boundaries import GPT2_PATTERN, SPACES

END_OF_TEXT = "<|endoftext|>"
CHAT_TEMPLATE = "chat_template.jinja"
GPT2_FINGERPRINT = "278c76e956a0d28755e8cb07656cc21c373520d95c7af18e9db55b9938d6c5fb"
LONGEST_LEARNT = 64  # characters of a token; longer ones would be lines of dashes, and slow to merge

# Runs of a kind of character that are longer, each found from its start only, so that long runs take linear time.
_LEARNT_RUNS = [
    re.compile(rf"(?<!{kind}){kind}{{{LONGEST_LEARNT + 1},}}")
    for kind in (r"[^\W_]", rf"[^a-zA-Z0-9{SPACES}]", f"[{SPACES}]")
]


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary, how text becomes ids of it, and which of them begin and end a text."""

    name: str
    backend: ByteBPE | Library
    eot: int  # the id of end-of-text
    eot_token: str = END_OF_TEXT
    specials: Mapping[str, int] = field(default_factory=dict)  # further special tokens, which merging never makes
    words: Mapping[str, int] = field(default_factory=dict)  # added tokens that get their ids in any text
    bos: int | None = None  # stands before a text, where the family has such a token
    more_ends: frozenset[int] = frozenset()  # further ids that end a text
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # of transformers', kept as they were
    limit: int | None = None  # the ids of its model, where that has fewer: a padding token needs no row of weights

    def __post_init__(self) -> None:
        ranks = self.backend.ranks if isinstance(self.backend, ByteBPE) else None
        missing = sum(bytes([byte]) not in ranks for byte in range(256)) if ranks is not None else 0
        if missing:
            raise UserError(f"the tokenizer {self.name} has no token for {missing} of the 256 bytes")
        words = [self.eot_token, *self.specials, *self.words]
        if len(set(words)) != len(words) or "" in words:
            raise UserError(f"the special tokens of the tokenizer {self.name} are not all different")
        ids = [*self.backend.pieces, *self._added.values()]
        if {*map(type, ids)} != {int} or min(ids) < 0 or max(ids) >= MOST_IDS:
            raise UserError(f"the ids of the tokenizer {self.name} are not numbers from 0 to {MOST_IDS:,}")
        count = len(self._added) + len(self.backend.pieces if ranks is None else ranks)
        if len(set(ids)) != count:
            raise UserError(f"the tokenizer {self.name} has {count:,} tokens and {len(set(ids)):,} ids")
        for id in (*self.ends, *([] if self.bos is None else [self.bos])):
            if id not in self._bytes:
                raise UserError(f"the tokenizer {self.name} has no token {id}, which starts or ends a text")

    @property
    def keeps_files(self) -> bool:
        """Whether its vocabulary is in files of transformers', which are saved again as they are."""
        return not self.files.keys().isdisjoint(("tokenizer.json", "vocab.json"))

    @property
    def _added(self) -> dict[str, int]:
        return {**self.all_specials, **self.words}

    @property
    def pattern(self) -> str:
        """The pattern that cuts a text into pieces before merging; empty where none is known."""
        return self.backend.pattern

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a text."""
        return self.more_ends | {self.eot}

    @property
    def opening(self) -> list[int]:
        """The ids that stand before a document in a stream: end-of-text, and what begins a text."""
        return [self.eot] if self.bos is None else [self.eot, self.bos]

    @cached_property
    def all_specials(self) -> dict[str, int]:
        """End-of-text and the further special tokens, with their ids."""
        return {self.eot_token: self.eot, **self.specials}

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        added = {id: word.encode("utf-8", "replace") for word, id in self._added.items()}
        return {**self.backend.pieces, **added, **self.backend.added_pieces}

    @cached_property
    def vocab_size(self) -> int:
        """The highest id plus one: the number of ids, special tokens included, if no id is unused."""
        return 1 + max(self._bytes)

    @property
    def usable(self) -> int:
        """The number of ids that its model takes."""
        return min(self.vocab_size, self.limit or self.vocab_size)

    @property
    def known(self) -> list[int]:
        """The ids that have a token, and that its model takes."""
        return sorted(id for id in self._bytes if id < self.usable)

    def for_model(self, ids: int) -> "Tokenizer":
        """Returns the tokenizer of a model of so many ``ids``, which may be fewer: only a text that needs one of the
        others is refused. Raises `UserError` where one of them begins or ends a text."""
        if self.vocab_size <= ids:
            return replace(self, limit=None) if self.limit else self
        if max(self.eot, self.bos or 0) >= ids:
            raise UserError(
                f"the tokenizer has {self.vocab_size:,} ids, the model {ids:,}, without the one that starts or ends "
                "a text",
                "put the model's own tokenizer next to it",
            )
        return replace(self, limit=ids, more_ends=frozenset(id for id in self.more_ends if id < ids))

    def _usable(self, ids: Ids) -> Ids:
        if self.limit is not None and len(ids) and (highest := int(ids.max())) >= self.limit:
            word = self._bytes[highest].decode("utf-8", "replace")
            raise UserError(
                f'the text contains "{word}", token {highest:,}, but the model has {self.limit:,} ids',
                "remove it: the model was never trained on it",
            )
        return ids

    @cached_property
    def chat_template(self) -> str | None:
        """The template with which a chat becomes text (Jinja), if the family has one."""
        return self.template_in(self.files)

    @staticmethod
    def template_in(files: Mapping[str, bytes]) -> str | None:
        """Returns the chat template in some of transformers' files."""
        if CHAT_TEMPLATE in files:
            return files[CHAT_TEMPLATE].decode("utf-8", "replace")
        said = json.loads(files.get("tokenizer_config.json", b"{}")).get("chat_template")
        if isinstance(said, list):  # several, each with its name
            named = [each for each in said if isinstance(each, dict)]
            said = next((each.get("template") for each in named if each.get("name") == "default"), None)
        return said if isinstance(said, str) else None

    def encode(self, text: str, specials: bool = False, continues: bool = False) -> Ids:
        """Returns the ids of ``text``, uint32. With ``specials``, special tokens get their ids; else they are text.
        ``continues``: the text follows another one, so that no space is put before it."""
        return self._usable(self.backend.encode(text, self._added if specials else self.words, specials, continues))

    def encode_marked(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Returns the ids of ``text``, special tokens among them, and which of them have a part in one of the ``spans``
        of characters."""
        ids = self.encode(text, specials=True)
        if isinstance(self.backend, Library):
            starts, ends = self.backend.offsets(text)
        else:
            ends = np.cumsum([len(self._bytes[id]) for id in ids.tolist()], dtype=np.int64)
            starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
            spans = [(self.backend.size(text[:start]), self.backend.size(text[:end])) for start, end in spans]
        marked = np.zeros(len(ids), np.bool_)
        for start, end in spans:
            marked |= (starts < end) & (ends > start)
        return ids, marked

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        """Returns the ids of each text, without special tokens."""
        return [self._usable(ids) for ids in self.backend.encode_all(texts, self.words)]

    def prompt(self, text: str) -> list[int]:
        """Returns the ids from which a text is continued, one at least: those that transformers gives, where its files
        are kept. Special tokens in a prompt get their ids then; under a vocabulary of ours they are text."""
        ids: list[int] = self.encode(text, specials=bool(self.files)).tolist()
        return ([] if self.bos is None else [self.bos]) + ids or [self.eot]

    def document(self, text: str) -> Ids:
        """Returns the ids of a document by itself, without the end-of-text before it."""
        ids = self.encode(text)
        return ids if self.bos is None else np.concatenate([np.array([self.bos], np.uint32), ids])

    def document_bytes(self, ids: Sequence[int]) -> bytes:
        """Returns the bytes of a document's ids, or of its first ones, without what was put before its text."""
        if self.bos is not None and list(ids[:1]) == [self.bos]:
            ids = ids[1:]
        return self.decode_bytes(ids).removeprefix(b" " if self.backend.adds_space else b"")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Returns the bytes of ``ids``, one token's after the other's. An id without a token has none: models may have
        more ids than their vocabulary."""
        try:
            return b"".join(map(self._bytes.__getitem__, ids))
        except KeyError:
            return b"".join(self._bytes.get(id, b"") for id in ids)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._bytes.values()))

    def least_tokens(self, text: str) -> int:
        """Returns a lower bound on the number of tokens of ``text``, without tokenizing it: 0 under a
        ``tokenizer.json``, which may shorten a text by any amount before it cuts it."""
        return 0 if isinstance(self.backend, Library) else -(-self.backend.size(text) // self._longest)

    def check(self, ids: Sequence[int]) -> None:
        """Raises `UserError` for an id outside the vocabulary."""
        for id in ids:
            if not 0 <= id < self.usable:
                raise UserError(f"id {id} is outside the vocabulary of {self.usable:,}")

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ``ids``; invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    @cached_property
    def fingerprint(self) -> str:
        """A sha256 over all that decides which ids a text gets."""
        library = isinstance(self.backend, Library)  # whose file has the pattern
        digest = hashlib.sha256(f"{'' if library else self.pattern}\0{self.eot}\0{self.eot_token}\0".encode())
        digest.update(self.backend.data if isinstance(self.backend, Library) else to_tiktoken(self.backend.ranks))
        if self.specials:
            digest.update(json.dumps(sorted(self.specials.items())).encode())
        further = _further(self)
        if further:
            digest.update(json.dumps(further, sort_keys=True).encode())
        return digest.hexdigest()

    def gives_the_ids_of(self, other: "Tokenizer") -> bool:
        """Whether it is the same as another: by its fingerprint or, where one of the two is of an older version of gpt,
        in which tiktoken ran vocabularies of others, by its pattern and tokens."""
        mine, theirs = ((each.pattern, each.eot, each.bos, each._added, each._bytes) for each in (self, other))
        is_older = type(self.backend) is not type(other.backend) and self.pattern != ""
        return self.fingerprint == other.fingerprint or (is_older and mine == theirs)


def _further(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns what files record, beside all else, of a tokenizer that has more than ours have."""
    found = {
        "nfc": isinstance(tokenizer.backend, ByteBPE) and tokenizer.backend.nfc,
        "words": dict(tokenizer.words),
        "bos": tokenizer.bos,
    }
    return {key: value for key, value in found.items() if value not in (False, None, {})}


def _learnt_parts(text: str) -> Iterator[str]:
    """Yields the parts of a text in which no run is longer than `LONGEST_LEARNT`."""
    runs = (run.span() for kind in _LEARNT_RUNS for run in kind.finditer(text))
    cuts = {cut for start, end in runs for cut in range(start + LONGEST_LEARNT, end, LONGEST_LEARNT)}
    for start, end in pairwise([0, *sorted(cuts), len(text)]):
        yield text[start:end]


def bytes_tokenizer() -> Tokenizer:
    """Returns the tokenizer of the 256 bytes and end-of-text: 257 ids."""
    return Tokenizer("bytes", ByteBPE(GPT2_PATTERN, {bytes([byte]): byte for byte in range(256)}), 256)


def learn_tokenizer(texts: Iterable[str], vocab_size: int, specials: Sequence[str] = ()) -> Tokenizer:
    """Learns a byte-level BPE of ``vocab_size`` ids from ``texts`` (Sennrich et al. 2016). The last ids are
    end-of-text's and those of the further ``specials``, in order.

    Raises `UserError` where the texts have fewer pairs to merge than that takes.
    """
    least = 257 + len(specials)
    if vocab_size < least:
        also = f" and {len(specials)} more" if specials else ""
        raise UserError(f"vocab-size is {vocab_size}; it must be at least {least}: the 256 bytes and end-of-text{also}")
    tokenizer = learn_tokenizer_up_to(texts, vocab_size, specials)
    if tokenizer.vocab_size < vocab_size:
        raise UserError(
            f"the text supports a vocabulary of at most {tokenizer.vocab_size:,} ids, not {vocab_size:,}",
            f"use --vocab-size {tokenizer.vocab_size} or less, or more text",
        )
    return tokenizer


def learn_tokenizer_up_to(texts: Iterable[str], vocab_size: int, specials: Sequence[str] = ()) -> Tokenizer:
    """Learns a tokenizer like `learn_tokenizer`, of fewer ids where the texts support no more."""
    import rustbpe  # here, since only learning needs it

    check_specials(specials)
    learner = rustbpe.Tokenizer()
    pieces = (piece for text in texts for piece in _learnt_parts(text))
    learner.train_from_iterator(pieces, max(256, vocab_size - 1 - len(specials)), pattern=GPT2_PATTERN)
    ranks = {bytes(token): rank for token, rank in learner.get_mergeable_ranks()}
    further = {special: id for id, special in enumerate(specials, len(ranks) + 1)}
    return Tokenizer("bpe", ByteBPE(GPT2_PATTERN, ranks), len(ranks), specials=further)


def check_specials(specials: Sequence[str]) -> None:
    """Raises `UserError` for a further special token that is empty, repeated or not UTF-8."""
    for special in specials:
        if not special:
            raise UserError("a special token is empty")
        if special == END_OF_TEXT or list(specials).count(special) > 1:
            raise UserError(f'the special token "{special}" already exists')
        try:
            special.encode()
        except UnicodeEncodeError:  # invalid UTF-8 in a command line
            raise UserError(f"the special token {special!r} is not UTF-8", "give it in UTF-8") from None


ENCODINGS_URL = "https://openaipublic.blob.core.windows.net/encodings/"
_FILES = {  # tiktoken's encodings that share another's file
    "gpt2": "r50k_base",
    "p50k_edit": "p50k_base",
    "o200k_harmony": "o200k_base",
}


def named_tokenizers() -> list[str]:
    """Returns the names that need no file: ``bytes``, ``gpt2`` and tiktoken's further encodings."""
    return list(dict.fromkeys(["bytes", "gpt2", *tiktoken.list_encoding_names()]))


def gpt2_tokenizer() -> Tokenizer:
    """Returns the tokenizer of GPT-2 and GPT-3, 50,257 ids: tiktoken's ``r50k_base``."""
    return named_tokenizer("gpt2")


def named_tokenizer(name: str) -> Tokenizer:
    """Returns one of `named_tokenizers`; its file, if it has one, is fetched once into the user's cache.

    ``TIKTOKEN_CACHE_DIR`` names another folder. Raises `WorkError` offline, saying which file goes where.
    """
    if name == "bytes":
        return bytes_tokenizer()
    if name == "r50k_base":
        name = "gpt2"
    encoding = _fetched(name)
    pattern = encoding._pat_str.replace(r"\p{N}{1,3}+|", r"\p{N}{1,3}|")  # Oniguruma reads {1,3}+ as ({1,3})+
    specials: dict[str, int] = {}
    for word, id in encoding._special_tokens.items():
        if word != END_OF_TEXT and id not in specials.values():  # o200k_harmony has a second word for an id
            specials[word] = id
    return Tokenizer(name, ByteBPE(pattern, dict(encoding._mergeable_ranks)), encoding.eot_token, specials=specials)


def _fetched(name: str) -> tiktoken.Encoding:
    file = _FILES.get(name, name)
    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    folder = before or str(cache_dir() / "tiktoken")
    os.environ["TIKTOKEN_CACHE_DIR"] = folder  # tiktoken's default is a folder that all users share
    try:
        return tiktoken.get_encoding("r50k_base" if name == "gpt2" else name)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; ValueError is a wrong hash
        url = f"{ENCODINGS_URL}{file}.tiktoken"
        place = os.path.join(folder, hashlib.sha1(url.encode()).hexdigest())
        what = "GPT-2's vocabulary" if name == "gpt2" else f"the vocabulary {name}"
        raise WorkError(
            f"{what} is not on this machine and could not be downloaded ({type(error).__name__})",
            f"on a machine with a network, download {url}; then put it at {place}",
        ) from None
    finally:
        if before is None:
            del os.environ["TIKTOKEN_CACHE_DIR"]


def to_tiktoken(ranks: dict[bytes, int]) -> bytes:
    """Returns ranks in tiktoken's file format: a line per token, its bytes in base64 and its rank."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(token) + b" " + str(rank).encode() + b"\n" for token, rank in ordered)


def from_tiktoken(data: bytes, where: str) -> dict[bytes, int]:
    """Reads ranks in tiktoken's file format. Raises `UserError` naming a line that is none."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise UserError(f"{where}, line {number}: expected a token in base64 and its rank") from None
    return ranks


def auto_vocab_size(n_bytes: int) -> int:
    """Returns the vocabulary size for a text of ``n_bytes``, such that each id is frequent (benchmarks/defaults.md)."""
    for size, below in ((512, 300_000), (1024, 2_000_000), (2048, 10_000_000), (4096, 50_000_000), (8192, 500_000_000)):
        if n_bytes < below:
            return size
    return 16_384


def describe(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns what files record of a tokenizer beside its ranks."""
    library = isinstance(tokenizer.backend, Library)
    return {
        "name": tokenizer.name,
        "pattern": tokenizer.pattern,
        "eot": tokenizer.eot,
        "eot_token": tokenizer.eot_token,
        "specials": dict(tokenizer.specials),
        "fingerprint": tokenizer.fingerprint,
        **({"library": True} if library else {}),
        **_further(tokenizer),
        **({"more_ends": sorted(tokenizer.more_ends)} if tokenizer.more_ends else {}),
        **({"files": sorted(tokenizer.files)} if tokenizer.files else {}),
    }
