"""``gpt data``: the catalogue of corpora."""

import shlex
import time
from typing import Annotated

import typer

from . import render_data
from .options import Json, Quiet

app = typer.Typer(help="The catalogue: texts to train on by name. See what there is, and fetch it.")


def _names() -> list[str]:
    from gpt.text import catalogue

    return catalogue.names()


Name = Annotated[str, typer.Argument(help="A corpus: gpt data list.", autocompletion=_names)]


@app.command("list")
def list_corpora(json: Json = False) -> None:
    """List the corpora: what they are, how large, under which license, and whether they are here."""
    from gpt.text import catalogue

    render_data.corpora([catalogue.corpus(name) for name in catalogue.names()], json)


@app.command()
def show(name: Name, json: Json = False) -> None:
    """Show all about a corpus: its files, their sums, and where they lie or will."""
    from gpt.text import catalogue

    render_data.corpus(catalogue.corpus(name), json)


@app.command()
def fetch(name: Name, json: Json = False, quiet: Quiet = False) -> None:
    """Fetch a corpus into the cache. What was cut or interrupted goes on where it ended."""
    from gpt.text import catalogue

    found = catalogue.corpus(name)
    started = time.monotonic()
    with render_data.fetching(quiet) as on_bytes:
        catalogue.fetch(name, on_bytes)
    render_data.fetched(found, time.monotonic() - started, f"gpt train {shlex.quote(name)}", json)
