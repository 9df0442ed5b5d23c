"""The output of commands on token folders."""

import shlex
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpt.events import format_seconds
from gpt.words import counted

from . import render

if TYPE_CHECKING:
    from gpt.text.token_folder import TokenFolder


def tokens_json(folder: "TokenFolder", seconds: float) -> dict[str, Any]:
    """Returns the object of ``gpt tokenize --json``."""
    return {
        "out": str(folder.path),
        "documents": folder.documents,
        "bytes": folder.bytes,
        "tokens": folder.tokens,
        "shards": len(folder.shards),
        "vocab_size": folder.tokenizer.vocab_size,
        "tokenizer": folder.tokenizer.name,
        "seconds": round(seconds, 2),
        "bytes_per_second": round(folder.bytes / max(seconds, 1e-9), 1),
    }


def details(folder: "TokenFolder", verified: bool, as_json: bool) -> None:
    """Prints all about a token folder; as JSON its manifest, and whether its checksums were compared."""
    if as_json:
        render.json_line({"path": str(folder.path), **folder.manifest, "verified": verified})
        return
    console = render.stdout()
    console.print(Text.assemble(("folder  ", "bold"), str(folder.path)))
    _sides(folder, console)
    manifest = folder.manifest
    by = {
        "end": "the end of the text is held out",
        "hash": "documents are held out by a hash of seed and text",
        "text": "a text of its own is held out",
        "nothing": "nothing is held out",
    }[manifest["split"]["by"]]
    rows = {
        "tokenizer": f"{folder.tokenizer.name}, {folder.tokenizer.vocab_size:,} ids",
        "split": by,
        "sources": f"{manifest['sources']['count']:,}",
        "shards": f"{len(folder.shards):,}" + (", every sum is right" if verified else ""),
        "replaced": counted(manifest["replaced"], "wrong byte") if manifest["replaced"] else "",
        "left out": counted(manifest["skipped"], "file, line or row", "files, lines or rows")
        if manifest["skipped"]
        else "",
        "part": "of a corpus: {} of {}".format(*manifest["part"]) if manifest["part"] else "",
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    for key, value in rows.items():
        if value:
            table.add_row(Text(key, "bold"), Text(value))
    console.print(table)
    _next(folder, console)


def tokens(folder: "TokenFolder", seconds: float) -> None:
    """Prints the result of a command that made a token folder."""
    console = render.stdout()
    took = f"  ({format_seconds(seconds)}, {folder.bytes / 1e6 / max(seconds, 1e-9):,.1f} MB/s)"
    console.print(Text.assemble(("saved  ", "bold"), f"{folder.path}{took}"))
    _sides(folder, console)
    _next(folder, console)


def _sides(folder: "TokenFolder", console: Console) -> None:
    for side, what in (("train", "train  "), ("val", "val    ")):
        counts = folder.manifest[side]
        console.print(
            Text.assemble(
                (what, "bold"),
                f"{counted(counts['tokens'], 'token')} of {counted(counts['bytes'], 'byte')}, "
                f"{counted(counts['documents'], 'document')}",
            )
        )


def _next(folder: "TokenFolder", console: Console) -> None:
    """Prints the command that takes the folder, or why none does."""
    if folder.manifest["part"]:
        console.print(Text.assemble(("join the parts  ", "bold"), "gpt data merge PART... -o DIR"))
    elif folder.manifest["train"]["tokens"]:
        console.print(Text.assemble(("train on it  ", "bold"), f"gpt train {shlex.quote(str(folder.path))}"))
    else:
        console.print("there is nothing to train on: all of the text is held out")
