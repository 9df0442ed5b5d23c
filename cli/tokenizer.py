"""``gpt tokenizer train|show|encode|decode``."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpt.errors import UserError

from . import render, render_text
from .options import Json, Quiet, given_text, option

if TYPE_CHECKING:
    from gpt.text.tokenizer import Tokenizer

HELP = "Learn a vocabulary, and look inside one."
MOST_SAMPLED = 2**31 - 1  # bytes: the learner counts in 32 bits
_TOKENIZER = "bytes, gpt2, another of tiktoken's names, or the path of a tokenizer, a run or a folder of transformers."

Named = Annotated[str | None, option("--tokenizer", help=_TOKENIZER, show_default="required")]


def train(
    text: Annotated[list[str], typer.Argument(help="Files, folders, - for stdin, or corpora by name.")],
    out: Annotated[Path, option("--out", "-o", help="The folder to make; never one that is there.")],
    vocab_size: Annotated[
        int | None, option(help="Ids, all special tokens included.", show_default="by the text's size")
    ] = None,
    sample_bytes: Annotated[
        int, option(help="Learn from so much at most, from everywhere in the text.")
    ] = 1_000_000_000,
    special: Annotated[
        list[str] | None,
        option(help="A further special token; may be repeated. Ids in this order.", show_default="none"),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Learn a byte-level BPE from TEXT, for `gpt train --tokenizer DIR`, transformers and tiktoken."""
    began = time.perf_counter()
    if not 1 <= sample_bytes <= MOST_SAMPLED:
        raise UserError(f"sample-bytes is {sample_bytes}; it must lie between 1 and {MOST_SAMPLED:,}")
    from gpt.text import tokenizer, tokenizer_files
    from gpt.text.sample import sample

    tokenizer_files.refuse_existing(out)
    parts = sample(text, sample_bytes)
    with render.Bar("read", "bytes", quiet) as bar:
        watched = render_text.watched(parts, bar, min(sample_bytes, parts.total))
        if vocab_size is None:
            size = tokenizer.auto_vocab_size(parts.total)
            learnt = tokenizer.learn_tokenizer_up_to(watched, size, special or ())
        else:
            learnt = tokenizer.learn_tokenizer(watched, vocab_size, special or ())
    tokenizer_files.save_tokenizer(learnt, out)
    render_text.learnt(learnt, out, parts.taken, parts.total, time.perf_counter() - began, json)


def show(
    tokenizer: Annotated[str, typer.Argument(help=_TOKENIZER)],
    text: Annotated[list[str] | None, typer.Argument(help="Count this too: files, folders, -, corpora.")] = None,
    longest: Annotated[int, option(help="How many of the longest tokens to list.")] = 20,
    json: Json = False,
) -> None:
    """Show what a vocabulary holds, and with TEXT how much of it that text uses."""
    if longest < 0:
        raise UserError(f"longest is {longest}; it must be 0 or more")
    found = _find(tokenizer)
    used = None
    if text:
        from gpt.text import readers, vocabulary

        used = vocabulary.usage(found, (document.text for document in readers.read(text).documents))
    render_text.vocabulary(found, longest, used, json)


def encode(
    text: Annotated[str | None, typer.Argument(help="What to encode.")] = None,
    tokenizer: Named = None,
    file: Annotated[Path | None, option(help="Read the text from a file; - is stdin.", show_default="none")] = None,
    special: Annotated[
        bool, option("--special", help="Special tokens in the text get their own ids; else they are ordinary text.")
    ] = False,
    json: Json = False,
) -> None:
    """Print the ids of TEXT, separated by spaces."""
    if text is None and file is None:
        raise UserError("there is nothing to encode", "give TEXT, or --file")
    words = given_text(text, file, "text", "--file")
    found = _find(tokenizer)
    ids = found.encode(words, specials=special).tolist()
    if json:
        render.json_line({"tokens": ids, "pieces": [found.decode([id]) for id in ids]})
    else:
        render.write(" ".join(map(str, ids)) + "\n")


def decode(
    ids: Annotated[list[str], typer.Argument(help="Numbers; - reads them from stdin.", metavar="IDS...")],
    tokenizer: Named = None,
) -> None:
    """Print the text of ids, its bytes exactly as they are."""
    words = [word for each in ids for word in (_stdin().split() if each == "-" else each.split())]
    numbers = [int(word) if word.isdecimal() and len(word) < 20 else -1 for word in words]
    if -1 in numbers:
        raise UserError(f'"{words[numbers.index(-1)]}" is no id', "ids are whole numbers, separated by spaces")
    render_text.write_bytes(_find(tokenizer).decode_bytes(numbers))


COMMANDS: dict[str, Callable[..., object]] = {"train": train, "show": show, "encode": encode, "decode": decode}


def _find(word: str | None) -> "Tokenizer":
    from gpt.text.tokenizer import named_tokenizers
    from gpt.text.tokenizer_files import find_tokenizer

    if word is None:
        raise UserError("--tokenizer is missing", f"{', '.join(named_tokenizers())}, or a path")
    return find_tokenizer(word)


def _stdin() -> str:
    return sys.stdin.buffer.read().decode("utf-8", "replace")
