"""``gpt data``: corpora and token folders."""

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from gpt.system.errors import UserError, did_you_mean
from gpt.system.files import reading

from ..options import Json, Quiet, option
from ..show import json_results, progress, render, render_data

app = typer.Typer(help="List and download corpora, and show token folders.")


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
