"""Prints the results of ``gpt data`` and ``gpt tokenize``: corpora and token folders."""

import shlex
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from rich.text import Text

from gpt.config.events import format_seconds
from gpt.system.words import counted

from . import render

if TYPE_CHECKING:
    from gpt.chat.examples import Example
    from gpt.corpus.repeats import Listing
    from gpt.corpus.token_folder import TokenFolder
    from gpt.documents.catalogue import CatalogueEntry


def format_size(size: int | None) -> str:
    """Formats a size in up to three digits: ``460 kB``, ``7 MB``, ``28.5 GB``."""
    if size is None:
        return ""
    value, units = float(size), ["bytes", "kB", "MB", "GB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:,.0f} {units[0]}" if value >= 99.95 else f"{value:.1f} {units[0]}".replace(".0 ", " ")


def status(entry: "CatalogueEntry") -> str:
    """Returns a corpus's download status: ``in Python``, ``here``, ``3 of 14 files`` or ``to fetch``."""
    if entry.python:
        return "in Python"
    downloaded = sum(entry.is_cached(file) for file in entry.all_files)
    if downloaded in (0, len(entry.all_files)):
        return "here" if downloaded else "to fetch"
    return f"{downloaded} of {len(entry.all_files)} files"


def corpora(all_corpora: "Sequence[CatalogueEntry]", as_json: bool) -> None:
    """Prints a line per corpus."""
    if as_json:
        for entry in all_corpora:
            render.json_line(_summary(entry))
        return
    console = render.stdout()
    table = render.table("Corpus", "What", ">Size", "License", "")
    table.columns[3].max_width = 13 if console.width < 120 else None
    for at in (0, 2, 4):
        table.columns[at].no_wrap = True
    for entry in all_corpora:
        table.add_row(entry.name, entry.title, format_size(entry.size), entry.license, status(entry))
    console.print(table)
    console.print(Text("gpt data show NAME prints details; gpt train NAME downloads missing files.", "dim"))


def corpus(entry: "CatalogueEntry", as_json: bool) -> None:
    """Prints a corpus in detail."""
    if as_json:
        render.json_line({**_summary(entry), "about": entry.about, "files": _files(entry)})
        return
    rows = {
        "what": entry.title,
        "about": entry.about,
        "license": entry.license,
        "language": entry.language,
        "homepage": entry.homepage,
        "size": ("about " if entry.python else "") + format_size(entry.size),
        "text": f'the column "{entry.field}"; its rows are {entry.rows}' if entry.field else "whole files",
        "status": status(entry),
        "folder": "" if entry.python else str(entry.folder),
    }
    console = render.stdout()
    console.print(Text(entry.name, "bold"))
    console.print(render.key_value_table(rows))
    if not entry.all_files:
        return
    table = render.table("File", "For", ">Bytes", "sha256", "")
    for column in table.columns:
        column.overflow = "fold"
    for file in _files(entry):
        size = "" if file["size"] is None else f"{file['size']:,}"
        status_text = "here" if file["here"] else "to fetch"
        table.add_row(file["name"], file["split"], size, file["sha256"] or "none published", status_text)
    console.print(table)


def _summary(entry: "CatalogueEntry") -> dict[str, Any]:
    """Returns the object of ``gpt data list --json``."""
    keys = ("name", "title", "license", "language", "homepage", "field", "rows", "size")
    return {key: getattr(entry, key) for key in keys} | {
        "status": status(entry),
        "folder": None if entry.python else str(entry.folder),
    }


def _files(entry: "CatalogueEntry") -> list[dict[str, Any]]:
    """Returns the files of ``gpt data show --json``."""
    return [
        {
            "name": file.name,
            "split": "val" if file in entry.val else "train",
            "url": file.url,
            "size": file.size,
            "sha256": file.sha256,
            "path": str(entry.folder / file.name),
            "here": entry.is_cached(file),
        }
        for file in entry.all_files
    ]


def fetch_result(entry: "CatalogueEntry", seconds: float, train: str, as_json: bool) -> None:
    """Prints the result of ``gpt data fetch``: the folder and a training command."""
    files = [entry.folder / file.name for file in entry.all_files]
    size = sum(path.stat().st_size for path in files)
    folder = None if entry.python else str(entry.folder)
    if as_json:
        values = {"name": entry.name, "folder": folder, "files": [str(path) for path in files], "bytes": size}
        render.json_line({**values, "seconds": round(seconds, 2), "train": train})
        return
    location = f"{folder}  ({counted(len(files), 'file')}, {size:,} bytes)"
    render.fact("here", location if folder else "part of Python: nothing to download")
    render.fact("train", train)


def details(folder: "TokenFolder", verified: bool, as_json: bool) -> None:
    """Prints a token folder in detail. As JSON, prints its manifest, and whether the checksums were verified."""
    if as_json:
        render.json_line({"path": str(folder.path), **folder.manifest, "verified": verified})
        return
    render.fact("folder", str(folder.path))
    _print_splits(folder)
    manifest, skipped = folder.manifest, folder.manifest["skipped"]
    split_rule = {
        "end": "the end of the text is held out",
        "hash": "documents are chosen by a hash of the seed and the text",
        "text": "a separate text is held out",
        "nothing": "nothing is held out",
    }[manifest["split"]["by"]]
    rows = {
        "tokenizer": f"{folder.tokenizer.name}, {folder.tokenizer.vocab_size:,} ids",
        "split": split_rule,
        "sources": f"{manifest['sources']['count']:,}",
        "shards": f"{len(folder.shards):,}" + (", all checksums match" if verified else ""),
        "replaced": counted(manifest["replaced"], "invalid byte") if manifest["replaced"] else "",
        "left out": counted(skipped, "file, line or row", "files, lines or rows") if skipped else "",
    }
    render.stdout().print(render.key_value_table(rows))
    _print_next_command(folder)


def tokens(folder: "TokenFolder", seconds: float, as_json: bool, is_resumed: bool = False) -> None:
    """Prints a newly created token folder. The throughput of a resumed command is unknown."""
    throughput = None if is_resumed else round(folder.bytes / max(seconds, 1e-9), 1)
    if as_json:
        values = {"out": str(folder.path), **{key: getattr(folder, key) for key in ("documents", "bytes", "tokens")}}
        values |= {"shards": len(folder.shards), "vocab_size": folder.tokenizer.vocab_size}
        values |= {"tokenizer": folder.tokenizer.name, "seconds": round(seconds, 2), "bytes_per_second": throughput}
        render.json_line(values | {key: folder.manifest[key] for key in ("replaced", "skipped")})
        return
    rate = "" if throughput is None else f", {throughput / 1e6:,.1f} MB/s"
    render.fact("saved", f"{folder.path}  ({format_seconds(seconds)}{rate})")
    _print_splits(folder)
    _print_next_command(folder)


def _print_splits(folder: "TokenFolder") -> None:
    for split in ("train", "val"):
        counts = folder.manifest[split]
        size = f"{counted(counts['tokens'], 'token')} of {counted(counts['bytes'], 'byte')}"
        render.fact(split, f"{size}, {counted(counts['documents'], 'document')}")


def _print_next_command(folder: "TokenFolder") -> None:
    if folder.manifest["train"]["tokens"]:
        render.fact("train on it", f"gpt train {shlex.quote(str(folder.path))}")
    else:
        render.stdout().print("nothing to train on: all of the text is held out")


SHOWN_REPEATS = 10  # Maximum repeats of a kind in the terminal. JSON has more.


def repeats(listing: "Listing", as_json: bool) -> None:
    """Prints the repeats of a token folder."""
    summary, copies = listing.summary(), listing.copies()
    passages, held_out = listing.passages("train"), listing.passages("val")
    if as_json:
        lists = {"repeated_documents": list(copies), "repeated_passages": passages, "held_out_passages": held_out}
        render.json_line(summary | lists)
        return
    share = f"{summary['copied_share']:.1%} of the text"
    render.fact("copies", f"{summary['copies']:,} of {counted(summary['documents'], 'document')}, {share}")
    _print_repeats("Copy of", ((c["text"], _place(c["copy"]), _place(c["original"])) for c in copies))
    for label, share, rows in (
        ("repeated passages", f"{summary['repeated_share']:.1%} of the training text", passages),
        ("held-out passages in the training text", f"{summary['held_out_share']:.1%} of the held-out text", held_out),
    ):
        render.fact(label, share)
        _print_repeats("First in", ((r["text"], _places(r), _place(r["first"])) for r in rows))


def example_copies(count: int, copies: "Sequence[tuple[Example, Example]]", as_json: bool) -> None:
    """Prints the pairs or conversations that are equal to an earlier one."""
    rows = [{"copy": example.where, "original": first.where, "text": example.texts[0]} for example, first in copies]
    if as_json:
        render.json_line({"documents": count, "copies": len(copies), "repeated_documents": rows})
        return
    render.fact("copies", f"{len(copies):,} of {counted(count, 'example')}")
    _print_repeats("Copy of", ((row["text"], row["copy"], row["original"]) for row in rows))


def _print_repeats(origin: str, rows: Iterable[tuple[str, str, str]]) -> None:
    table = render.table("Text", "Document", origin)
    table.columns[0].max_width, table.columns[0].no_wrap, table.columns[0].overflow = 60, True, "ellipsis"
    for text, place, first in islice(rows, SHOWN_REPEATS):
        table.add_row(*map(Text, (" ".join(text.split()), place, first)))
    if table.row_count:
        render.stdout().print(table)


def _places(passage: dict[str, Any]) -> str:
    more = passage["repeats"] - 1
    return _place(passage["places"][0]) + (f" and {more:,} more" if more else "")


def _place(place: dict[str, Any]) -> str:
    side = "held-out" if place["side"] == "val" else "training"
    return f"{side} {place['document']:,}" + (f": {place['file']}" if place["file"] else "")
