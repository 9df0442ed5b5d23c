"""``gpt data``: corpora and token folders."""

import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from gpt.config import ReadConfig
from gpt.errors import UserError, did_you_mean
from gpt.files import reading

from . import progress, render, render_data
from .options import Json, Quiet, option, takes

app = typer.Typer(help="List and download corpora, and check token folders.")


def _names() -> list[str]:
    from gpt.text import catalogue

    return catalogue.names()


Name = Annotated[str, typer.Argument(help="Name of a corpus, from `gpt data list`", autocompletion=_names)]


@app.command("list")
def list_corpora(json: Json = False) -> None:
    """List the corpora: their size, license, and whether they are downloaded."""
    from gpt.text import catalogue

    render_data.corpora([catalogue.corpus(name) for name in catalogue.names()], json)


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="Name of a corpus, or a token folder", autocompletion=_names)],
    verify: Annotated[bool, option("--verify", help="Check every checksum of a token folder")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show a corpus and its files, or a token folder, in detail.

    gpt data show shakespeare
    gpt data show tokens --verify
    """
    from gpt.text import catalogue

    with reading(Path(name)):
        is_folder = Path(name).is_dir()
    if not is_folder:
        if verify:
            raise UserError(f"{name} is not a token folder", "--verify checks the checksums of a token folder")
        if name not in _names():
            raise UserError(f'there is no corpus or folder "{name}"', did_you_mean(name, _names()))
        render_data.corpus(catalogue.corpus(name), json)
        return
    from gpt.text import token_folder

    with reading(Path(name)):
        if not token_folder.is_token_folder(name):
            raise UserError(f"{name} is not a token folder", "create one: gpt tokenize TEXT -o DIR")
    folder = token_folder.TokenFolder(name)
    if verify:
        with progress.Bar("compared", "tokens", quiet) as bar:
            folder.verify(bar.reach)
    render_data.details(folder, verify, json)


@app.command("check")
@takes(ReadConfig, without=("field", "split_on"))
def check(
    settings: ReadConfig,
    text: Annotated[list[str], typer.Argument(help="Token folders, a run, or files of pairs or conversations")],
    json: Json = False,
) -> None:
    """List repeated documents and passages, and held-out text that is also in the training text.

    gpt data check tokens
    gpt data check runs/book
    gpt data check pairs.jsonl
    """
    from gpt.runs import folder
    from gpt.runs.record import RunRecord
    from gpt.text import examples, repeats, token_folder

    if len(text) == 1 and folder.is_run(Path(text[0])):
        tokens, record = Path(text[0], "tokens"), RunRecord.read(Path(text[0]))
        run_settings: dict[str, Any] = {"val_text": None, **(record.settings or {})}
        names = run_settings.keys() & {"encoding", "errors", "skip_bad"}
        settings = replace(settings, **{name: run_settings[name] for name in names})
        text = [*(record.texts or text), *filter(None, [run_settings["val_text"]])]
        text = [str(tokens)] if token_folder.is_token_folder(tokens) else text
    if folders := token_folder.find_token_folders(text):
        render_data.repeats(repeats.Listing(token_folder.TokenFolder(*folders)), json)
        return
    corpus = examples.read_all_examples(text, settings, render.note)
    if corpus is None:
        message = f"{text[0]} is not a token folder, and has no pairs or conversations"
        raise UserError(message, "create a token folder: gpt tokenize TEXT -o DIR")
    render_data.example_copies(len(corpus.train), examples.find_copies(corpus.train), json)


@app.command("fetch")
def fetch(name: Name, json: Json = False, quiet: Quiet = False) -> None:
    """Download a corpus into the cache.

    gpt data fetch shakespeare
    """
    from gpt.text import catalogue

    corpus = catalogue.corpus(name)
    start_time = time.monotonic()
    with progress.Bar("fetched", "bytes", quiet) as bar:
        catalogue.fetch(name, lambda done, total: bar.reach(done, total or done))
    render_data.fetch_result(corpus, time.monotonic() - start_time, f"gpt train {shlex.quote(name)}", json)
