"""The output of commands on token folders."""

import shlex
from typing import TYPE_CHECKING

from gpt.events import format_seconds
from gpt.words import counted

from . import render

if TYPE_CHECKING:
    from gpt.text.token_folder import TokenFolder


def details(folder: "TokenFolder", verified: bool, as_json: bool) -> None:
    """Prints all about a token folder; as JSON its manifest, and whether its checksums were compared."""
    if as_json:
        render.json_line({"path": str(folder.path), **folder.manifest, "verified": verified})
        return
    render.fact("folder", str(folder.path))
    _sides(folder)
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
    render.stdout().print(render.keyed(rows))
    _next(folder)


def tokens(folder: "TokenFolder", seconds: float, as_json: bool) -> None:
    """Prints the result of a command that made a token folder."""
    rate = folder.bytes / max(seconds, 1e-9)
    if as_json:
        render.json_line(
            {
                "out": str(folder.path),
                "documents": folder.documents,
                "bytes": folder.bytes,
                "tokens": folder.tokens,
                "shards": len(folder.shards),
                "vocab_size": folder.tokenizer.vocab_size,
                "tokenizer": folder.tokenizer.name,
                "seconds": round(seconds, 2),
                "bytes_per_second": round(rate, 1),
            }
        )
        return
    render.fact("saved", f"{folder.path}  ({format_seconds(seconds)}, {rate / 1e6:,.1f} MB/s)")
    _sides(folder)
    _next(folder)


def _sides(folder: "TokenFolder") -> None:
    for side in ("train", "val"):
        counts = folder.manifest[side]
        size = f"{counted(counts['tokens'], 'token')} of {counted(counts['bytes'], 'byte')}"
        render.fact(side, f"{size}, {counted(counts['documents'], 'document')}")


def _next(folder: "TokenFolder") -> None:
    """Prints the command that takes the folder, or why none does."""
    if folder.manifest["part"]:
        render.fact("join the parts", "gpt data merge PART... -o DIR")
    elif folder.manifest["train"]["tokens"]:
        render.fact("train on it", f"gpt train {shlex.quote(str(folder.path))}")
    else:
        render.stdout().print("there is nothing to train on: all of the text is held out")
