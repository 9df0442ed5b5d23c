"""A tokenizer as a byte-level BPE, for formats that other programs run."""

from collections.abc import Mapping
from dataclasses import dataclass

from gpt.system.errors import UserError
from gpt.tokenizers.backends import ByteBPE, LibraryTokenizer
from gpt.tokenizers.importing import byte_ranks, listed_merges
from gpt.tokenizers.saving import format_merges, merging_pairs
from gpt.tokenizers.tokenizer import END_OF_TEXT, Tokenizer


@dataclass(frozen=True)
class BPE:
    """A byte-level BPE."""

    pattern: str
    ranks: Mapping[bytes, int]  # Token bytes → id.
    merge_list: list[str] | None  # None if the merges follow from the ranks.
    skips_merges: bool  # Whether a piece that is a token skips the merges.
    nfc: bool

    @property
    def merges(self) -> list[str]:
        """The merges in order, as lines of ``merges.txt``."""
        return format_merges(merging_pairs(self.ranks)) if self.merge_list is None else self.merge_list


def to_bpe(backend: ByteBPE | LibraryTokenizer) -> BPE | None:
    """Returns a backend as a byte-level BPE, or None if it is another tokenizer."""
    if isinstance(backend, ByteBPE):
        return BPE(backend.pattern, backend.ranks, None, True, False)
    if not backend.pattern:
        return None
    model, added_tokens = backend.values["model"], backend.values.get("added_tokens") or []
    ranks = byte_ranks(model["vocab"], {END_OF_TEXT, *(token["content"] for token in added_tokens)})
    if ranks is None:
        return None
    skips_merges = bool(model.get("ignore_merges"))
    return BPE(backend.pattern, ranks, listed_merges(model), skips_merges, bool(backend.values.get("normalizer")))


def require_bpe(tokenizer: Tokenizer, target: str, hint: str) -> BPE:
    """Returns a tokenizer as a byte-level BPE. Raises `UserError` naming ``target`` if it is another tokenizer, or has
    tokens that the model does not have."""
    bpe = to_bpe(tokenizer.backend)
    if bpe is None:
        raise UserError(f"{target} needs a byte-level BPE, and this tokenizer.json is not a known one", hint)
    if max(bpe.ranks.values()) >= tokenizer.usable:
        raise UserError("this tokenizer has ordinary tokens that the model does not have", hint)
    return bpe


def added_words(tokenizer: Tokenizer) -> dict[str, int]:
    """Returns all special and added tokens with their ids."""
    return {**tokenizer.all_specials, **tokenizer.words}
