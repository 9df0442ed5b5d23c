"""A tokenizer in a GGUF file."""

from typing import Any

from gpt.errors import UserError
from gpt.text.backends import ByteBPE, byte_characters
from gpt.text.tokenizer import Tokenizer
from gpt.text.tokenizer_files import merging_pairs


def check(tokenizer: Tokenizer) -> None:
    """Raises `UserError` for a tokenizer that llama.cpp does not have, with the reason."""
    if not isinstance(tokenizer.backend, ByteBPE):
        raise UserError("this tokenizer is no byte-level BPE", "export a folder instead")


def add(writer: Any, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Writes the tokenizer of a model of ``vocab_size`` ids."""
    from gguf import TokenType

    assert isinstance(tokenizer.backend, ByteBPE)
    characters = byte_characters()

    def written(token: bytes) -> str:
        return token.decode("latin-1").translate(characters)

    words = [f"[PAD{id}]" for id in range(vocab_size)]
    types = [int(TokenType.UNUSED)] * vocab_size
    for token, id in tokenizer.backend.ranks.items():
        words[id], types[id] = written(token), int(TokenType.NORMAL)
    for word, id in tokenizer.all_specials.items():
        words[id], types[id] = word, int(TokenType.CONTROL)
    merges = [f"{written(a)} {written(b)}" for a, b in merging_pairs(tokenizer.backend.ranks)]
    if not merges:  # llama.cpp asks for one; this can merge nothing, since no text has these parts
        merges = [f"{tokenizer.eot_token} {tokenizer.eot_token}"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokenizer.eot)
    writer.add_bos_token_id(tokenizer.eot)
    writer.add_add_bos_token(False)
