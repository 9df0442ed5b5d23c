"""Prints the results of ``gpt data`` and ``gpt tokenize``: corpora and token folders."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from gpt.events import format_seconds
from gpt.words import counted

from . import render

if TYPE_CHECKING:
    from gpt.text.catalogue import CatalogueEntry
    from gpt.text.token_folder import TokenFolder


def size_in_words(size: int | None) -> str:
    """Returns a size in up to three digits: ``460 kB``, ``7 MB``, ``28.5 GB``."""
    if size is None:
        return ""
    value, units = float(size), ["bytes", "kB", "MB", "GB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:,.0f} {units[0]}" if value >= 99.95 else f"{value:.1f} {units[0]}".replace(".0 ", " ")


def status(found: "CatalogueEntry") -> str:
    """Returns ``in Python``, ``here``, ``3 of 14 files`` or ``to fetch``."""
    if found.python:
        return "in Python"
    here = sum(found.is_here(file) for file in found.all_files)
    if here in (0, len(found.all_files)):
        return "here" if here else "to fetch"
    return f"{here} of {len(found.all_files)} files"


def corpora(all_corpora: "Sequence[CatalogueEntry]", as_json: bool) -> None:
    """Prints a line per corpus."""
    if as_json:
        for found in all_corpora:
            render.json_line(_summary(found))
        return
    console = render.stdout()
    table = render.table("Corpus", "What", ">Size", "License", "")
    table.columns[3].max_width = 13 if console.width < 120 else None
    for at in (0, 2, 4):
        table.columns[at].no_wrap = True
    for found in all_corpora:
        table.add_row(found.name, found.title, size_in_words(found.size), found.license, status(found))
    console.print(table)
    console.print(Text("gpt data show NAME prints details; gpt train NAME downloads missing files.", "dim"))


def corpus(found: "CatalogueEntry", as_json: bool) -> None:
    """Prints a corpus in detail."""
    if as_json:
        render.json_line({**_summary(found), "about": found.about, "files": _files(found)})
        return
    rows = {
        "what": found.title,
        "about": found.about,
        "license": found.license,
        "language": found.language,
        "homepage": found.homepage,
        "size": ("about " if found.python else "") + size_in_words(found.size),
        "text": f'the column "{found.field}"; its rows are {found.rows}' if found.field else "whole files",
        "status": status(found),
        "folder": "" if found.python else str(found.folder),
    }
    console = render.stdout()
    console.print(Text(found.name, "bold"))
    console.print(render.key_value_table(rows))
    if not found.all_files:
        return
    table = render.table("File", "For", ">Bytes", "sha256", "")
    for column in table.columns:
        column.overflow = "fold"
    for file in _files(found):
        size = "" if file["size"] is None else f"{file['size']:,}"
        here = "here" if file["here"] else "to fetch"
        table.add_row(file["name"], file["split"], size, file["sha256"] or "none published", here)
    console.print(table)


def _summary(found: "CatalogueEntry") -> dict[str, Any]:
    """Returns the object of ``gpt data list --json``."""
    keys = ("name", "title", "license", "language", "homepage", "field", "rows", "size")
    return {key: getattr(found, key) for key in keys} | {
        "status": status(found),
        "folder": None if found.python else str(found.folder),
    }


def _files(found: "CatalogueEntry") -> list[dict[str, Any]]:
    """Returns the files of ``gpt data show --json``."""
    return [
        {
            "name": file.name,
            "split": "val" if file in found.val else "train",
            "url": file.url,
            "size": file.size,
            "sha256": file.sha256,
            "path": str(found.folder / file.name),
            "here": found.is_here(file),
        }
        for file in found.all_files
    ]


def fetched(found: "CatalogueEntry", seconds: float, train: str, as_json: bool) -> None:
    """Prints the result of ``gpt data fetch``: the folder and a training command."""
    files = [found.folder / file.name for file in found.all_files]
    size = sum(path.stat().st_size for path in files)
    folder = None if found.python else str(found.folder)
    if as_json:
        values = {"name": found.name, "folder": folder, "files": [str(path) for path in files], "bytes": size}
        render.json_line({**values, "seconds": round(seconds, 2), "train": train})
        return
    where = f"{folder}  ({counted(len(files), 'file')}, {size:,} bytes)"
    render.fact("here", where if folder else "part of Python: nothing to download")
    render.fact("train", train)


def details(folder: "TokenFolder", verified: bool, as_json: bool) -> None:
    """Prints a token folder in detail. The JSON is its manifest, and whether its checksums were verified."""
    if as_json:
        render.json_line({"path": str(folder.path), **folder.manifest, "verified": verified})
        return
    render.fact("folder", str(folder.path))
    _sides(folder)
    manifest = folder.manifest
    by = {
        "end": "the end of the text is held out",
        "hash": "documents are chosen by a hash of the seed and the text",
        "text": "a separate text is held out",
        "nothing": "nothing is held out",
    }[manifest["split"]["by"]]
    rows = {
        "tokenizer": f"{folder.tokenizer.name}, {folder.tokenizer.vocab_size:,} ids",
        "split": by,
        "sources": f"{manifest['sources']['count']:,}",
        "shards": f"{len(folder.shards):,}" + (", all checksums match" if verified else ""),
        "replaced": counted(manifest["replaced"], "invalid byte") if manifest["replaced"] else "",
        "left out": counted(manifest["skipped"], "file, line or row", "files, lines or rows")
        if manifest["skipped"]
        else "",
        "part": "of a corpus: {} of {}".format(*manifest["part"]) if manifest["part"] else "",
    }
    render.stdout().print(render.key_value_table(rows))
    _next(folder)


def tokens(folder: "TokenFolder", seconds: float, as_json: bool) -> None:
    """Prints a newly created token folder."""
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
    """Prints the next command for the folder, or why there is none."""
    if folder.manifest["part"]:
        render.fact("join the parts", "gpt data merge PART... -o DIR")
    elif folder.manifest["train"]["tokens"]:
        render.fact("train on it", f"gpt train {shlex.quote(str(folder.path))}")
    else:
        render.stdout().print("nothing to train on: all of the text is held out")
