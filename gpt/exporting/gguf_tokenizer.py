"""A tokenizer in a GGUF file: a byte-level BPE, as llama.cpp runs it.

It gives our ids but for three rare things (tests/exporting/test_llama_cpp.py). The 4,382 letters and digits that are
new in Unicode 16 are none there. Under the patterns of Llama 3 and Qwen, 's is no ending where the s is U+017F. Of
added words that overlap in a text it finds the longest first, and we the leftmost.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt.errors import UserError
from gpt.text.backends import ByteBPE, Library, in_characters
from gpt.text.boundaries import (
    CL100K_PATTERN,
    DIGITS_PATTERN,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    MINBPE_PATTERN,
    OLD_GPT2_PATTERN,
    backtracking,
)
from gpt.text.tokenizer import END_OF_TEXT, Tokenizer
from gpt.text.tokenizer_files import byte_ranks, listed_merges, merging_pairs, written

if TYPE_CHECKING:
    from gguf import GGUFWriter, TokenType

HINT = "export a folder instead: -o without .gguf"

# llama.cpp's name of each pattern (src/llama-vocab.cpp). Its form of o200k's cuts one text in twenty otherwise.
_PRE = {
    backtracking(GPT2_PATTERN): "gpt-2",
    OLD_GPT2_PATTERN: "gpt-2",
    backtracking(DIGITS_PATTERN): "smollm",
    CL100K_PATTERN: "llama-bpe",
    LLAMA3_PATTERN: "llama-bpe",
    MINBPE_PATTERN: "llama-bpe",  # which cuts a text as Llama 3's does
    **{each.replace("{1,3}", ""): "qwen2" for each in (LLAMA3_PATTERN, MINBPE_PATTERN)},
}
_WHOLE = "llama-bpe"  # under this name alone, a whole piece that is a token needs no merges, as in tiktoken

# The tokens at which llama.cpp ends a text because of their names, whatever a file says.
_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[", "<|fim_pad|>",
    "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>",
    "<|file_sep|>",
}  # fmt: skip
_NAMED_ENDS = 3  # as many ids a file can name: end of text, of a turn, of a message


def check(tokenizer: Tokenizer) -> None:
    """Raises `UserError` for a tokenizer to which llama.cpp would give other ids, or another end of a text."""
    bpe = _bpe(tokenizer.backend)
    if bpe is None:
        raise UserError("a .gguf file needs a byte-level BPE, and this tokenizer.json is not a known one", HINT)
    if max(bpe.ranks.values()) >= tokenizer.usable:
        raise UserError("this tokenizer has ordinary tokens that the model does not have", HINT)
    pre = _pre(bpe)
    if pre is None:
        raise UserError("llama.cpp does not support this tokenizer's pattern for splitting text into words", HINT)
    if bpe.whole != (pre == _WHOLE) and len(merging_pairs(bpe.ranks)) < sum(len(token) > 1 for token in bpe.ranks):
        raise UserError("this tokenizer has tokens that no merge produces: llama.cpp would give other ids", HINT)
    both = sorted({*map(in_characters, bpe.ranks)} & {*_added(tokenizer)})
    if both:
        raise UserError(f'"{both[0]}" is also an ordinary token: llama.cpp finds special tokens by their text', HINT)
    if len(_told_ends(tokenizer)) > _NAMED_ENDS:
        raise UserError(f"llama.cpp would not stop at all {len(tokenizer.ends)} end-of-text tokens", HINT)


def differences(tokenizer: Tokenizer) -> list[str]:
    """Returns what differs in llama.cpp, for a user to know, and is no reason to refuse: files of Qwen live with it."""
    found, bpe = [], _bpe(tokenizer.backend)
    if bpe is not None and bpe.nfc:
        found.append("llama.cpp does not normalize text to NFC, as this tokenizer does: give it NFC text")
    missing = 0 if bpe is None else sum(bytes([byte]) not in bpe.ranks for byte in range(256))
    if missing:
        found.append(f"this tokenizer has no token for {missing} of the 256 bytes: llama.cpp drops them")
    more = [word for word, id in _added(tokenizer).items() if word in _ENDS and id not in tokenizer.ends]
    if more:
        found.append(f"llama.cpp also stops at {', '.join(more)}, regardless of the file")
    return found


def add(writer: "GGUFWriter", tokenizer: Tokenizer, vocab_size: int) -> None:
    """Adds the tokenizer to a GGUF file: for each of the model's ``vocab_size`` ids its text and type, the merges in
    their order, the pattern's name, and which ids begin and end a text. `check` has passed it."""
    bpe = _bpe(tokenizer.backend)
    assert bpe is not None
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre(bpe) or "")
    tokens = list(_tokens(tokenizer, vocab_size))
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    # llama.cpp wants one merge at least; of this pair neither side is a token.
    writer.add_token_merges(bpe.merges or written([(b"\0\0", b"\0\0")]))
    writer.add_bos_token_id(tokenizer.eot if tokenizer.bos is None else tokenizer.bos)
    writer.add_pad_token_id(tokenizer.eot)
    writer.add_add_bos_token(tokenizer.bos is not None)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    tell = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for told, id in zip(tell, _told_ends(tokenizer), strict=False):
        told(id)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


@dataclass(frozen=True)
class _BPE:
    """A byte-level BPE as a GGUF file has it."""

    pattern: str
    ranks: Mapping[bytes, int]  # a token's bytes → its id
    listed: list[str] | None  # the merges; None for those that the ranks mean
    whole: bool  # a piece that is a token needs no merges
    nfc: bool

    @property
    def merges(self) -> list[str]:
        return written(merging_pairs(self.ranks)) if self.listed is None else self.listed


def _bpe(backend: ByteBPE | Library) -> _BPE | None:
    if isinstance(backend, ByteBPE):
        return _BPE(backend.pattern, backend.ranks, None, True, backend.nfc)
    if not backend.pattern:
        return None
    model, added = backend.values["model"], backend.values.get("added_tokens") or []
    ranks = byte_ranks(model["vocab"], {END_OF_TEXT, *(token["content"] for token in added)})
    if ranks is None:
        return None
    whole = bool(model.get("ignore_merges"))
    return _BPE(backend.pattern, ranks, listed_merges(model), whole, bool(backend.values.get("normalizer")))


def _pre(bpe: _BPE) -> str | None:
    pattern = backtracking(bpe.pattern)
    # cl100k's keeps white space at a text's end together, and Llama 3's cuts it after the last line end. That is the
    # same as long as no token reaches across.
    across = (token for token in bpe.ranks if re.search(rb"[\r\n]", token) and token[-1:] not in b"\r\n")
    return None if pattern == CL100K_PATTERN and any(across) else _PRE.get(pattern)


def _added(tokenizer: Tokenizer) -> dict[str, int]:
    return {**tokenizer.all_specials, **tokenizer.words}


def _told_ends(tokenizer: Tokenizer) -> list[int]:
    """Returns the ids that end a text and must be told: end-of-text first, then those that llama.cpp does not know by
    their names."""
    known = {id for word, id in _added(tokenizer).items() if word in _ENDS}
    return [tokenizer.eot, *sorted(tokenizer.more_ends - known)]


def _tokens(tokenizer: Tokenizer, vocab_size: int) -> Iterator[tuple[str, "TokenType"]]:
    """Yields the text and the type of each id. llama.cpp wants all texts to differ."""
    from gguf import TokenType

    bpe = _bpe(tokenizer.backend)
    assert bpe is not None
    found = {id: (in_characters(token), TokenType.NORMAL) for token, id in bpe.ranks.items()}
    found |= {id: (word, TokenType.CONTROL) for word, id in tokenizer.all_specials.items()}
    found |= {id: (word, TokenType.USER_DEFINED) for word, id in tokenizer.words.items()}
    taken = {text for text, _ in found.values()}
    for id in range(vocab_size):
        name = f"[unused{id}]"
        while name in taken:
            name += "_"
        yield found.get(id, (name, TokenType.UNUSED))
