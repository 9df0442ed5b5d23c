"""``gpt data``: the catalogue of corpora."""

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from gpt.errors import UserError, did_you_mean
from gpt.files import reading

from . import progress, render_data
from .options import Json, Quiet, option

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


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A corpus of the list, or a folder of tokens.", autocompletion=_names)],
    verify: Annotated[bool, option("--verify", help="Read a folder of tokens and compare every checksum.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show all about a corpus: its files, their checksums and places; or about a folder of tokens."""
    from gpt.text import catalogue

    with reading(Path(name)):
        is_folder = Path(name).is_dir()
    if not is_folder:
        if verify:
            raise UserError(f"{name} is no folder of tokens", "--verify compares the checksums in a folder of tokens")
        if name not in _names():
            raise UserError(f'there is no corpus "{name}", and no folder of that name', did_you_mean(name, _names()))
        render_data.corpus(catalogue.corpus(name), json)
        return
    from gpt.text import token_folder

    with reading(Path(name)):
        if not token_folder.is_token_folder(name):
            raise UserError(f"{name} is no folder of tokens", "make one: gpt tokenize TEXT -o DIR")
    folder = token_folder.TokenFolder(name)
    if verify:
        with progress.Bar("compared", "tokens", quiet) as bar:
            folder.verify(bar.reach)
    render_data.details(folder, verify, json)


@app.command("fetch")
def fetch(name: Name, json: Json = False, quiet: Quiet = False) -> None:
    """Fetch a corpus into the cache; a download that was cut or interrupted is resumed."""
    from gpt.text import catalogue

    found = catalogue.corpus(name)
    started = time.monotonic()
    with progress.Bar("fetched", "bytes", quiet) as bar:
        catalogue.fetch(name, lambda done, total: bar.reach(done, total or done))
    render_data.fetched(found, time.monotonic() - started, f"gpt train {shlex.quote(name)}", json)


@app.command("merge")
def merge(
    part: Annotated[list[str], typer.Argument(help="The folders that gpt tokenize --part made, all of them.")],
    out: Annotated[str | None, option("--out", "-o", help="The folder to make.", show_default="none")] = None,
    json: Json = False,
) -> None:
    """Join token folders made in parts into the one that a single machine would have made."""
    from gpt.text import token_folder

    if out is None:
        raise UserError("where should the joined folder go?", "name a new folder: gpt data merge PART... -o DIR")
    began = time.monotonic()
    folder = token_folder.merge(part, out)
    render_data.tokens(folder, time.monotonic() - began, json)
