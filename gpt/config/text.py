"""Options for reading and tokenizing text, shared by several commands. Imports no torch."""

import codecs
from dataclasses import dataclass
from functools import partial
from typing import Literal

from gpt.config.settings import PANELS, check_options, option
from gpt.system.errors import UserError

_run, _model, _tune, _data, _read = (partial(option, panel=name) for name in PANELS[:5])
_machine = partial(option, panel="Machine")


@dataclass(frozen=True)
class ReadConfig:
    """Options for reading files as documents."""

    field: str = _read(
        "text", "Key or column that holds the text, in JSON, CSV and Parquet files", metavar="NAME", level="basic"
    )
    split_on: str | None = _read(
        None, "Line that separates documents within a plain-text file", metavar="LINE", shown="one document per file"
    )
    encoding: str = _read("utf-8", "Encoding of plain text, JSON, CSV and TSV files", metavar="NAME")
    errors: Literal["strict", "replace"] = _read(
        "strict", "Undecodable bytes: stop (strict), or count them and use U+FFFD (replace)"
    )
    skip_bad: bool = _read(False, "Skip and count unreadable files, lines and rows instead of stopping")

    def __post_init__(self) -> None:
        check_options(self)
        try:
            codecs.lookup(self.encoding)
        except (LookupError, ValueError):  # ValueError for a name with a lone surrogate or a zero byte.
            raise UserError(f'there is no encoding "{self.encoding}"', "utf-8, latin-1, cp1252, utf-16 …") from None


@dataclass(frozen=True)
class LearnConfig(ReadConfig):
    """Options for training a tokenizer on text."""

    vocab_size: int | None = _data(
        None, "Vocabulary size, special tokens included", shown="set by the size of the text", low=257, high=2**24
    )
    sample_bytes: int = _data(
        1_000_000_000, "Train the tokenizer on at most N bytes, sampled evenly", low=1, high=2**31 - 1
    )


@dataclass(frozen=True)
class TextConfig(LearnConfig):
    """Options for tokenizing and splitting text, shared by ``gpt tokenize`` and ``gpt train``."""

    tokenizer: str = _data(
        "auto", "auto: train a BPE on the text; or bytes, gpt2, a tiktoken name, or a path", metavar="NAME",
        level="basic",
    )  # fmt: skip
    val_fraction: float = _data(
        0.1, "Share to hold out: the end of the text, or with 200+ documents a random sample", low=0
    )
    val_text: str | None = _data(None, "Hold out this text instead, and train on all of TEXT", metavar="TEXT")
    jobs: int | None = _machine(
        None, "Tokenizer threads; any number gives the same ids", shown="one per core", low=1, high=1024
    )
    seed: int = _run(1337, "Random seed of the split into training and held-out text", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.val_fraction >= 1:
            raise UserError(f"val-fraction is {self.val_fraction}; it must be in [0, 1)")
        if self.tokenizer != "auto" and self.vocab_size is not None:
            raise UserError(f"--vocab-size needs --tokenizer auto; {self.tokenizer} has a fixed size")


@dataclass(frozen=True)
class TokenizeConfig(TextConfig):
    """Options of ``gpt tokenize``."""

    out: str | None = _run(
        None, "New folder for the tokens", flags=("-o",), metavar="DIR", shown="required", level="basic"
    )
    resume: bool = _run(False, "Resume an unfinished folder", level="basic")
