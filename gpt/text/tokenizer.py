"""Text ↔ ids. Every tokenizer here is a byte-level BPE that tiktoken runs: GPT-2's, plain bytes, or one learnt.

``<|endoftext|>`` always has an id, stands before each document, and is ordinary text when a text contains it.
"""

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import tiktoken

from gpt.errors import UserError, WorkError
from gpt.text.catalogue import cache_dir

END_OF_TEXT = "<|endoftext|>"

# GPT-2's pattern, in the spelling of tiktoken's r50k_base: possessive where that changes no match but keeps the
# regex engine from backtracking.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
GPT2_FINGERPRINT = "278c76e956a0d28755e8cb07656cc21c373520d95c7af18e9db55b9938d6c5fb"
GPT2_VOCAB_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"

# A run of white space this long overflows the regex engine's stack if something follows it (tiktoken 0.14: at a
# million). The pattern gives the run's last character to what follows, so a cut before it changes no id.
LONG_SPACE = 10_000
LONG_PIECE = 2**20  # characters; a single piece longer than this is cut: merging takes more than linear time
LONGEST_LEARNT = 64  # characters of a token; longer ones would be rulers of dashes, and slow to take apart

# What \s means to the regex engine: Unicode's White_Space (Python's own \s has four control characters more).
_SPACES = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_OTHERS = rf"[^a-zA-Z0-9{_SPACES}]"


def _run(kind: str, least: int, then: str = "") -> re.Pattern[str]:
    """A run of a kind of character. It is looked at from its start alone: a text of long runs takes linear time."""
    return re.compile(rf"(?<!{kind}){kind}{{{least},}}{then}")


_LONG_SPACE_RUN = _run(f"[{_SPACES}]", LONG_SPACE, rf"(?=[{_SPACES}][^{_SPACES}])")
_LONG_PIECE_RUNS = [_run(kind, LONG_PIECE + 1) for kind in (r"[^\W\d_]", r"\d", _OTHERS)]
_LEARNT_RUNS = [_run(kind, LONGEST_LEARNT + 1) for kind in (r"[^\W_]", _OTHERS, f"[{_SPACES}]")]

Ids = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary and how text is cut before merging: of `learn_tokenizer`, `bytes_tokenizer`, `gpt2_tokenizer`."""

    name: str
    pattern: str
    ranks: dict[bytes, int]  # a token's bytes → its id, which is its rank in merging too
    eot: int  # the id of end-of-text
    eot_token: str = END_OF_TEXT

    def __post_init__(self) -> None:
        missing = sum(bytes([byte]) not in self.ranks for byte in range(256))
        if missing:
            raise UserError(f"the tokenizer {self.name} has no token for {missing} of the 256 bytes")
        ids = set(self.ranks.values()) | {self.eot}
        if len(ids) != len(self.ranks) + 1 or min(ids) != 0 or max(ids) != len(self.ranks):
            raise UserError(f"the ids of the tokenizer {self.name} are not 0 to {len(self.ranks):,}, each once")

    @property
    def vocab_size(self) -> int:
        """How many ids there are, end-of-text included."""
        return len(self.ranks) + 1

    @cached_property
    def _encoding(self) -> tiktoken.Encoding:
        return tiktoken.Encoding(
            self.name, pat_str=self.pattern, mergeable_ranks=self.ranks, special_tokens={self.eot_token: self.eot}
        )

    def encode(self, text: str) -> Ids:
        """The ids of ``text``, dtype uint32. ``<|endoftext|>`` in it is ordinary text."""
        pieces = [self._encoding.encode_to_numpy(piece, disallowed_special=()) for piece in _pieces(text)]
        return np.concatenate(pieces) if len(pieces) != 1 else pieces[0]

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of ``ids``, exactly. Raises `UserError` for an id outside the vocabulary."""
        try:
            return self._encoding.decode_bytes(ids)
        except KeyError:
            bad = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise UserError(f"id {bad} is outside the vocabulary of {self.vocab_size:,}") from None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over everything that decides which ids a text gets."""
        digest = hashlib.sha256(f"{self.pattern}\0{self.eot}\0{self.eot_token}\0".encode())
        digest.update(to_tiktoken(self.ranks))
        return digest.hexdigest()


def _pieces(text: str) -> Iterator[str]:
    """``text`` in parts, together the whole, that the regex engine and the merging survive whatever they hold.

    The cut inside a long run of white space changes no id; the one inside a piece of over 1 MiB does.
    """
    spaces = (match.end() for match in _LONG_SPACE_RUN.finditer(text)) if len(text) > LONG_SPACE else ()
    return _cut(text, {*spaces, *_long_piece_cuts(text)})


def _long_piece_cuts(text: str) -> set[int]:
    return _every(text, _LONG_PIECE_RUNS, LONG_PIECE) if len(text) > LONG_PIECE else set()


def count_cut_pieces(text: str) -> int:
    """How often a single piece of over 1 MiB is cut in ``text``, which changes its ids."""
    return len(_long_piece_cuts(text))


def _every(text: str, runs: Iterable[re.Pattern[str]], length: int) -> set[int]:
    """Where runs are to be cut to be no longer than ``length``."""
    found = (match for run in runs for match in run.finditer(text))
    return {cut for match in found for cut in range(match.start() + length, match.end(), length)}


def _cut(text: str, cuts: Iterable[int]) -> Iterator[str]:
    for start, end in pairwise([0, *sorted(cuts), len(text)]):
        yield text[start:end]


def bytes_tokenizer() -> Tokenizer:
    """The 256 bytes and end-of-text: 257 ids, nothing to learn."""
    return Tokenizer("bytes", GPT2_PATTERN, {bytes([byte]): byte for byte in range(256)}, 256)


def learn_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of ``vocab_size`` ids (end-of-text included) learnt from ``texts`` (Sennrich et al. 2016).

    Raises `UserError` where the texts have fewer pairs to merge than that takes.
    """
    if vocab_size < 257:
        raise UserError(f"vocab-size is {vocab_size}; it must be at least 257: the 256 bytes and end-of-text")
    tokenizer = learn_tokenizer_up_to(texts, vocab_size)
    if tokenizer.vocab_size < vocab_size:
        raise UserError(
            f"the text supports a vocabulary of {tokenizer.vocab_size:,} ids at most, not {vocab_size:,}",
            f"take --vocab-size {tokenizer.vocab_size} or less, or more text",
        )
    return tokenizer


def learn_tokenizer_up_to(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """As `learn_tokenizer`, with fewer ids where the texts support no more."""
    import rustbpe  # here, since only learning needs it

    learner = rustbpe.Tokenizer()
    pieces = (piece for text in texts for piece in _cut(text, _every(text, _LEARNT_RUNS, LONGEST_LEARNT)))
    learner.train_from_iterator(pieces, vocab_size - 1, pattern=GPT2_PATTERN)
    ranks = {bytes(token): rank for token, rank in learner.get_mergeable_ranks()}
    return Tokenizer("bpe", GPT2_PATTERN, ranks, len(ranks))


def gpt2_tokenizer() -> Tokenizer:
    """The 50,257 ids of GPT-2 and GPT-3: tiktoken's ``r50k_base``, fetched once into the user's cache.

    ``TIKTOKEN_CACHE_DIR`` names another folder. Raises `WorkError` offline, saying which file goes where.
    """
    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    folder = before or str(cache_dir() / "tiktoken")
    os.environ["TIKTOKEN_CACHE_DIR"] = folder  # tiktoken's own default is a folder that all users share
    try:
        encoding = tiktoken.get_encoding("r50k_base")
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; ValueError is a wrong hash
        place = os.path.join(folder, hashlib.sha1(GPT2_VOCAB_URL.encode()).hexdigest())
        raise WorkError(
            f"GPT-2's vocabulary is not on this machine and could not be fetched ({type(error).__name__})",
            f"download {GPT2_VOCAB_URL} elsewhere and put it at {place}",
        ) from None
    finally:
        if before is None:
            del os.environ["TIKTOKEN_CACHE_DIR"]
    return Tokenizer("gpt2", GPT2_PATTERN, dict(encoding._mergeable_ranks), encoding.eot_token)


def to_tiktoken(ranks: dict[bytes, int]) -> bytes:
    """Ranks in tiktoken's file form: a line a token, its bytes in base64 and its rank."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(token) + b" " + str(rank).encode() + b"\n" for token, rank in ordered)


def from_tiktoken(data: bytes, where: str) -> dict[bytes, int]:
    """The ranks in a file of tiktoken's form; `UserError` naming the line where it is another."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise UserError(f"{where}, line {number}: not a token in base64 and its rank") from None
    return ranks


def auto_vocab_size(n_bytes: int) -> int:
    """How many ids to learn from ``n_bytes``: each must be seen often enough to be learnt (docs/defaults.md)."""
    for size, below in ((512, 300_000), (1024, 2_000_000), (2048, 10_000_000), (4096, 50_000_000), (8192, 500_000_000)):
        if n_bytes < below:
            return size
    return 16_384


def make_tokenizer(kind: str, vocab_size: int | None, texts: Sequence[str], most: int = 2**24) -> Tokenizer:
    """The tokenizer that ``--tokenizer`` and ``--vocab-size`` ask for. ``texts`` is what it may learn from; ``most``
    bounds the size where none was asked for."""
    if kind == "bytes":
        return bytes_tokenizer()
    if kind == "gpt2":
        return gpt2_tokenizer()
    assert kind == "auto", kind  # TrainConfig knows no other
    if vocab_size is not None:
        return learn_tokenizer(texts, vocab_size)
    return learn_tokenizer_up_to(texts, min(most, auto_vocab_size(sum(len(text.encode()) for text in texts))))


def describe(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a checkpoint records of a tokenizer beside its ranks."""
    return {
        "name": tokenizer.name,
        "pattern": tokenizer.pattern,
        "eot": tokenizer.eot,
        "eot_token": tokenizer.eot_token,
        "fingerprint": tokenizer.fingerprint,
    }
