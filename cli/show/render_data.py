"""Prints the results of ``gpt data``, ``runs``, ``tokenize`` and ``tokenizer``."""

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from gpt.config.events import format_seconds
from gpt.system.words import counted, format_bytes

from . import json_results, render, terminal

if TYPE_CHECKING:
    from gpt.corpus.token_folder import TokenFolder
    from gpt.documents.catalogue import CatalogueEntry
    from gpt.insight.report import RunSummary
    from gpt.tokenizers.tokenizer import Tokenizer


def runs(summaries: "Sequence[RunSummary]") -> None:
    """Prints a line per run."""
    table = render.table("Run", "Text", ">Parameters", ">Bits per byte", "Verdict", "Started (UTC)", ">Size")
    for run in summaries:
        bits = "" if run.bits_per_byte is None else f"{run.bits_per_byte:.3f}"
        parameters = "" if run.parameters is None else f"{run.parameters:,}"
        started = (run.started or "")[:16].replace("T", " ")
        table.add_row(run.name, run.text or "", parameters, bits, run.verdict, started, format_bytes(run.bytes))
    render.show(table, Text("gpt report runs/NAME prints details; gpt train --resume runs/NAME finishes a run.", "dim"))


def corpora(entries: "Sequence[CatalogueEntry]") -> None:
    """Prints a line per corpus."""
    table = render.table("Corpus", "What", ">Size", "License", "")
    table.columns[3].max_width = 13 if terminal.stdout().width < 120 else None
    for at in (0, 2, 4):
        table.columns[at].no_wrap = True
    for entry in entries:
        status = json_results.status(entry)
        size = format_bytes(entry.size) if entry.size else ""
        table.add_row(entry.name, entry.title, size, entry.license, status)
    render.show(table, Text("gpt data show NAME prints details; gpt train NAME downloads missing files.", "dim"))


def corpus(entry: "CatalogueEntry", data: dict[str, Any]) -> None:
    """Prints a corpus in detail."""
    rows = {
        "what": entry.title,
        "about": entry.about,
        "license": entry.license,
        "language": entry.language,
        "homepage": entry.homepage,
        "size": ("about " if entry.python else "") + (format_bytes(entry.size) if entry.size else ""),
        "text": f'the column "{entry.field}"; its rows are {entry.rows}' if entry.field else "whole files",
        "status": data["status"],
        "folder": data["folder"] or "",
    }
    render.show(Text(entry.name, "bold"), render.key_value_table(rows))
    if not data["files"]:
        return
    table = render.table("File", "For", ">Bytes", "sha256", "")
    for column in table.columns:
        column.overflow = "fold"
    for file in data["files"]:
        size = "" if file["size"] is None else f"{file['size']:,}"
        status = "here" if file["here"] else "to fetch"
        table.add_row(file["name"], file["split"], size, file["sha256"] or "none published", status)
    render.show(table)


def fetched(data: dict[str, Any]) -> None:
    """Prints the result of ``gpt data fetch``: the folder and a training command."""
    location = f"{data['folder']}  ({counted(len(data['files']), 'file')}, {data['bytes']:,} bytes)"
    render.fact("here", location if data["folder"] else "part of Python: nothing to download")
    render.fact("train", data["train"])


def tokens(folder: "TokenFolder", data: dict[str, Any]) -> None:
    """Prints a newly created token folder."""
    throughput = data["bytes_per_second"]
    rate = "" if throughput is None else f", {throughput / 1e6:,.1f} MB/s"
    render.fact("saved", f"{folder.path}  ({format_seconds(data['seconds'])}{rate})")
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
        render.show("nothing to train on: all of the text is held out")


def write_bytes(data: bytes) -> None:
    """Writes bytes to stdout unchanged, or as text on a terminal."""
    if sys.stdout.isatty():
        terminal.write(data.decode("utf-8", "backslashreplace"))
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def trained_tokenizer(data: dict[str, Any]) -> None:
    """Prints the result of ``gpt tokenizer train``."""
    total = data["bytes"]
    sample = f"{total:,} bytes" if data["sampled_bytes"] == total else f"{data['sampled_bytes']:,} of {total:,} bytes"
    seconds = format_seconds(data["seconds"])
    render.fact("saved", f"{data['out']}  ({data['vocab_size']:,} ids from {sample} in {seconds})")
    render.fact("more", f"gpt tokenizer show {shlex.quote(data['out'])}")


def vocabulary(tokenizer: "Tokenizer", longest: int) -> None:
    """Prints a vocabulary."""
    from gpt.corpus import vocabulary

    render.show(_facts_table(tokenizer))
    if tokens := vocabulary.find_longest(tokenizer, longest):
        rows = ((f"{id}", f"{len(token):,}", f'"{vocabulary.to_printable(token)}"') for id, token in tokens)
        render.show(render.table(">id", ">bytes", "Longest", rows=rows))


def _facts_table(tokenizer: "Tokenizer") -> Table:
    table = render.table()
    unused = tokenizer.vocab_size - len(tokenizer.known)
    unused_note = f", {unused:,} of them without a token" if unused else ""
    table.add_row("name", tokenizer.name)
    table.add_row("ids", f"{tokenizer.vocab_size:,}{unused_note}")
    for word, id in list(tokenizer.all_specials.items())[:20]:
        table.add_row("special", f"{id}  {word}{_role(tokenizer, id)}")
    if len(tokenizer.all_specials) > 20:
        table.add_row("", f"and {len(tokenizer.all_specials) - 20:,} more")
    if tokenizer.words:
        table.add_row("added", ", ".join(list(tokenizer.words)[:20]))
    table.add_row("backend", tokenizer.backend.library)
    if tokenizer.pattern:
        table.add_row("pattern", tokenizer.pattern)
    table.add_row("fingerprint", tokenizer.fingerprint)
    return table


def _role(tokenizer: "Tokenizer", id: int) -> str:
    """Says whether a special token starts or ends a text. Says nothing if end-of-text is the only special token."""
    if id == tokenizer.bos:
        return "  starts a text"
    return "  ends a text" if id in tokenizer.ends and (tokenizer.specials or tokenizer.bos is not None) else ""
