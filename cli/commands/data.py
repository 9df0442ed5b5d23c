"""``gpt data``: corpora."""

import shlex
import time
from typing import Annotated

import typer

from ..options import Json, Quiet
from ..show import json_results, progress, render, render_data

app = typer.Typer(help="List and download corpora.")


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
def show(name: Name, json: Json = False) -> None:
    """Show a corpus and its files in detail.

    gpt data show shakespeare
    """
    from gpt.documents import catalogue

    entry = catalogue.corpus(name)
    data = json_results.corpus(entry)
    render.json_line(data) if json else render_data.corpus(entry, data)


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
