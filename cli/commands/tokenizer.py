"""``gpt tokenizer train|show|encode|decode``."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpt.config.text import LearnConfig
from gpt.system.errors import UserError
from gpt.system.files import check_new

from .. import inputs
from ..options import Json, Model, OutPage, Quiet, TextFile, option, takes
from ..show import json_results, page, progress, render, render_data, terminal

if TYPE_CHECKING:
    from gpt.tokenizers.tokenizer import Tokenizer

app = typer.Typer(help="Train and inspect tokenizers.")
_TOKENIZER = "bytes, gpt2, a tiktoken name, or the path of a tokenizer, a run or a Transformers folder"

TokenizerName = Annotated[
    str | None, option("--tokenizer", metavar="NAME", help=_TOKENIZER, show_default="the model's")
]


@app.command("train")
@takes(LearnConfig)
def train(
    settings: LearnConfig,
    text: Annotated[list[str], typer.Argument(help="Files, folders or corpora, as in `gpt train`")],
    out: Annotated[Path, option("--out", "-o", metavar="DIR", help="New folder for the tokenizer")],
    special: Annotated[
        list[str] | None, option(metavar="TOKEN", help="Add a special token; repeatable, with ids in this order")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a byte-level BPE tokenizer for `gpt train`, Transformers and tiktoken.

    gpt tokenizer train book.txt -o tokenizer --vocab-size 4096
    """
    start_time = time.perf_counter()
    from gpt.corpus import vocabulary
    from gpt.tokenizers import saving

    check_new(out, saving.NEW_PATH_HINT)
    inputs.announce_stdin(text)
    with progress.TrainDisplay(quiet) as display:
        tokenizer, sample = vocabulary.train(text, settings, special or (), display)
    saving.save_tokenizer(tokenizer, out)
    seconds = time.perf_counter() - start_time
    data = json_results.trained_tokenizer(tokenizer, out, sample.bytes_taken, sample.bytes_seen, seconds)
    render.json_line(data) if json else render_data.trained_tokenizer(data)


@app.command("show")
def show(
    tokenizer: Annotated[str, typer.Argument(help=_TOKENIZER)],
    longest: Annotated[int, option(min=0, help="Number of the longest tokens to list")] = 20,
    json: Json = False,
) -> None:
    """Show a tokenizer's vocabulary.

    gpt tokenizer show runs/book
    """
    loaded, _ = _load_tokenizer(tokenizer, None)
    if json:
        render.json_line(json_results.vocabulary(loaded, longest))
    else:
        render_data.vocabulary(loaded, longest)


@app.command("encode")
def encode(
    text: Annotated[str | None, typer.Argument(help="Text to encode")] = None,
    tokenizer: TokenizerName = None,
    model: Model = None,
    file: TextFile = None,
    special: Annotated[
        bool, option("--special", help="Encode special tokens in the text as such, not as plain text")
    ] = False,
    show: Annotated[bool, option("--show", help="Show the text split into its tokens")] = False,
    out: OutPage = None,
    json: Json = False,
) -> None:
    """Print the token ids of a text, or with --show its tokens.

    gpt tokenizer encode "Once upon a time" --tokenizer gpt2
    gpt tokenizer encode "Once upon a time" --show
    """
    words = inputs.read_text(text, file, "text", "--file")
    if not words and (show or out or (text is None and file is None)):
        raise UserError("there is nothing to encode", "give TEXT, or --file")
    page.check_out(out)
    loaded, name = _load_tokenizer(tokenizer, model)
    ids = loaded.encode(words, specials=special).tolist()
    if not (show or out or json):
        terminal.write(" ".join(map(str, ids)) + "\n")
        return
    from ..show import render_inspect

    data = json_results.encoded(words, ids, loaded, name)
    page.show(
        "tokens", f"tokens: {name}", out, json,
        data=lambda: [data],
        page=lambda: data,
        terminal=lambda: render_inspect.tokens(data),
    )  # fmt: skip


@app.command("decode")
def decode(
    ids: Annotated[list[str], typer.Argument(help="Token ids; - reads them from stdin", metavar="ID")],
    tokenizer: TokenizerName = None,
    model: Model = None,
) -> None:
    """Print the text of token ids, byte for byte.

    gpt tokenizer decode 7454 2402 257 640 --tokenizer gpt2
    """
    texts = (inputs.read_text(None, Path("-"), "ids", "-") if text == "-" else text for text in ids)
    words = [word for text in texts for word in text.split()]
    numbers = [int(word) if word.isascii() and word.isdecimal() and len(word) < 20 else -1 for word in words]
    if -1 in numbers:
        raise UserError(f'"{words[numbers.index(-1)]}" is not a token id', "ids are whole numbers, separated by spaces")
    loaded, _ = _load_tokenizer(tokenizer, model)
    loaded.check(numbers)
    space = b" " if loaded.backend.adds_space else b""
    render_data.write_bytes(loaded.decode_bytes(numbers).removeprefix(space))


def _load_tokenizer(name: str | None, model: str | None) -> "tuple[Tokenizer, str]":
    if name is not None:
        from gpt.tokenizers.finding import find_tokenizer

        if model is not None:
            raise UserError("--tokenizer and -m both name a tokenizer", "give one of them")
        return find_tokenizer(name), name
    from gpt.runs import checkpoint, folder, model_config

    path = folder.find_checkpoint(model)
    return checkpoint.load_tokenizer(path, model_config.load_config(path)), str(path)
