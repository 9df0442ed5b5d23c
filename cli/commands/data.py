"""``gpt data``: corpora and token folders."""

import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from gpt.config.text import ReadConfig
from gpt.system.errors import UserError, did_you_mean
from gpt.system.files import reading

from ..options import Json, Quiet, option, takes
from ..show import json_results, progress, render, render_data

app = typer.Typer(help="List and download corpora, and check token folders.")


def _names() -> list[str]:
    from gpt.documents import catalogue

    return catalogue.names()


Name = Annotated[str, typer.Argument(help="Name of a corpus, from `gpt data list`", autocompletion=_names)]


@app.command("list")
def list_corpora(json: Json = False) -> None:
    """List the corpora: their size, license, and whether they are downloaded."""
    from gpt.documents import catalogue

    entries = [catalogue.corpus(name) for name in catalogue.names()]
    render.json_line(*map(json_results.corpus_summary, entries)) if json else render_data.corpora(entries)


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
    from gpt.documents import catalogue

    with reading(Path(name)):
        is_folder = Path(name).is_dir()
    if not is_folder:
        if verify:
            raise UserError(f"{name} is not a token folder", "--verify checks the checksums of a token folder")
        if name not in _names():
            raise UserError(f'there is no corpus or folder "{name}"', did_you_mean(name, _names()))
        entry = catalogue.corpus(name)
        data = json_results.corpus(entry)
        render.json_line(data) if json else render_data.corpus(entry, data)
        return
    from gpt.corpus import token_folder
    from gpt.documents.sources import is_token_folder

    with reading(Path(name)):
        if not is_token_folder(name):
            raise UserError(f"{name} is not a token folder", "create one: gpt tokenize TEXT -o DIR")
    folder = token_folder.TokenFolder(name)
    if verify:
        with progress.Bar("compared", "tokens", quiet) as bar:
            folder.verify(bar.reach)
    render.json_line(json_results.token_folder(folder, verify)) if json else render_data.token_folder(folder, verify)


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
    from gpt.chat import examples
    from gpt.corpus import repeats, token_folder
    from gpt.documents.sources import is_token_folder
    from gpt.runs import folder
    from gpt.runs.record import RunRecord

    if len(text) == 1 and folder.is_run(Path(text[0])):
        tokens, record = Path(text[0], "tokens"), RunRecord.read(Path(text[0]))
        run_settings: dict[str, Any] = {"val_text": None, **(record.settings or {})}
        names = run_settings.keys() & {"encoding", "errors", "skip_bad"}
        settings = replace(settings, **{name: run_settings[name] for name in names})
        text = [*(record.texts or text), *filter(None, [run_settings["val_text"]])]
        text = [str(tokens)] if is_token_folder(tokens) else text
    if folders := token_folder.find_token_folders(text):
        listing = repeats.Listing(token_folder.TokenFolder(*folders))
        render.json_line(json_results.repeats(listing)) if json else render_data.repeats(listing)
        return
    corpus = examples.read_all_examples(text, settings, render.note)
    if corpus is None:
        message = f"{text[0]} is not a token folder, and has no pairs or conversations"
        raise UserError(message, "create a token folder: gpt tokenize TEXT -o DIR")
    data = json_results.example_copies(len(corpus.train), examples.find_copies(corpus.train))
    render.json_line(data) if json else render_data.example_copies(data)


@app.command("fetch")
def fetch(name: Name, json: Json = False, quiet: Quiet = False) -> None:
    """Download a corpus into the cache.

    gpt data fetch shakespeare
    """
    from gpt.documents import catalogue

    corpus = catalogue.corpus(name)
    start_time = time.monotonic()
    with progress.Bar("fetched", "bytes", quiet) as bar:
        catalogue.fetch(name, lambda done, total: bar.reach(done, total or done))
    data = json_results.fetched(corpus, time.monotonic() - start_time, f"gpt train {shlex.quote(name)}")
    render.json_line(data) if json else render_data.fetched(data)
