"""``gpt tokenizer train|show|encode|decode``."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpt.config import LearnConfig, ReadConfig
from gpt.errors import UserError
from gpt.files import check_new

from . import inputs, progress, render, render_vocabulary
from .options import Json, Quiet, TextFile, option, takes

if TYPE_CHECKING:
    from gpt.text.tokenizer import Tokenizer

app = typer.Typer(help="Train and inspect tokenizers.")
_TOKENIZER = "bytes, gpt2, a tiktoken name, or the path of a tokenizer, a run or a Transformers folder"

Named = Annotated[str | None, option("--tokenizer", metavar="NAME", help=_TOKENIZER, show_default="required")]


@app.command("train")
@takes(LearnConfig)
def train(
    settings: LearnConfig,
    text: Annotated[list[str], typer.Argument(help="Files, folders or corpora, as in `gpt train`")],
    out: Annotated[
        Path | None, option("--out", "-o", metavar="DIR", help="New folder for the tokenizer", show_default="required")
    ] = None,
    special: Annotated[
        list[str] | None,
        option(metavar="TOKEN", help="Add a special token; repeatable, with ids in this order"),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a byte-level BPE tokenizer for `gpt train`, Transformers and tiktoken.

    gpt tokenizer train book.txt -o tokenizer --vocab-size 4096
    """
    began = time.perf_counter()
    if out is None:
        raise UserError("where should the tokenizer go?", "name a new folder: gpt tokenizer train TEXT... -o DIR")
    from gpt.text import tokenizer_files, vocabulary

    check_new(out, tokenizer_files.NEW)
    inputs.announce(text)
    with progress.TrainDisplay(quiet) as display:
        learnt, sample = vocabulary.learn(text, settings, special or (), display)
    tokenizer_files.save_tokenizer(learnt, out)
    render_vocabulary.learnt(learnt, out, sample.taken, sample.seen, time.perf_counter() - began, json)


@app.command("show")
@takes(ReadConfig)
def show(
    settings: ReadConfig,
    tokenizer: Annotated[str, typer.Argument(help=_TOKENIZER)],
    text: Annotated[list[str] | None, typer.Argument(help="Text to count tokens of, as in `gpt train`")] = None,
    longest: Annotated[int, option(help="Number of the longest tokens to list")] = 20,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show a tokenizer's vocabulary, and how much of it a text uses.

    gpt tokenizer show runs/book
    gpt tokenizer show gpt2 book.txt
    """
    if longest < 0:
        raise UserError(f"longest is {longest}; it must be 0 or more")
    found = _find(tokenizer)
    used = None
    inputs.announce(text)
    if text:
        from gpt.text import vocabulary

        with progress.TrainDisplay(quiet) as display:
            used = vocabulary.usage(found, text, settings, display)
    render_vocabulary.vocabulary(found, longest, used, json)


@app.command("encode")
def encode(
    text: Annotated[str | None, typer.Argument(help="Text to encode")] = None,
    tokenizer: Named = None,
    file: TextFile = None,
    special: Annotated[
        bool, option("--special", help="Encode special tokens in the text as such, not as plain text")
    ] = False,
    json: Json = False,
) -> None:
    """Print the token ids of a text.

    gpt tokenizer encode "Once upon a time" --tokenizer gpt2
    """
    if text is None and file is None:
        raise UserError("there is nothing to encode", "give TEXT, or --file")
    words = inputs.text(text, file, "text", "--file")
    found = _find(tokenizer)
    ids = found.encode(words, specials=special).tolist()
    if json:
        render.json_line({"tokens": ids, "pieces": [found.decode([id]) for id in ids]})
    else:
        render.write(" ".join(map(str, ids)) + "\n")


@app.command("decode")
def decode(
    ids: Annotated[list[str], typer.Argument(help="Token ids; - reads them from stdin", metavar="ID")],
    tokenizer: Named = None,
) -> None:
    """Print the text of token ids, byte for byte.

    gpt tokenizer decode 7454 2402 257 640 --tokenizer gpt2
    """
    words = [word for each in ids for word in (_stdin().split() if each == "-" else each.split())]
    numbers = [int(word) if word.isascii() and word.isdecimal() and len(word) < 20 else -1 for word in words]
    if -1 in numbers:
        raise UserError(f'"{words[numbers.index(-1)]}" is not a token id', "ids are whole numbers, separated by spaces")
    found = _find(tokenizer)
    found.check(numbers)
    space = b" " if found.backend.adds_space else b""
    render_vocabulary.write_bytes(found.decode_bytes(numbers).removeprefix(space))


def _find(word: str | None) -> "Tokenizer":
    from gpt.text.tokenizer import named_tokenizers
    from gpt.text.tokenizer_files import find_tokenizer

    if word is None:
        raise UserError("--tokenizer is missing", f"give {', '.join(named_tokenizers())}, or a path")
    return find_tokenizer(word)


def _stdin() -> str:
    stdin = Path("-")
    with inputs.opened(stdin, "ids") as stream:
        return inputs.bounded(stream, stdin, inputs.MOST_TEXT, "decode them in parts").decode("utf-8-sig", "replace")
