"""Prints the results of ``gpt tokenizer``."""

import shlex
import sys
from typing import TYPE_CHECKING, Any

from rich.table import Table

from gpt.events import format_seconds

from . import render, terminal

if TYPE_CHECKING:
    from gpt.text.tokenizer import Tokenizer
    from gpt.text.vocabulary import Usage


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


def vocabulary(tokenizer: "Tokenizer", longest: int, usage: "Usage | None") -> None:
    """Prints a vocabulary, and how much of it a text uses."""
    from gpt.text import vocabulary

    lengths, tokens = vocabulary.lengths(tokenizer), vocabulary.find_longest(tokenizer, longest)
    counts = ["tokens", *(f"{count:,}" for count in lengths.values())]
    columns = ("Bytes per token", *(f">{column}" for column in lengths))
    render.show(_facts_table(tokenizer, usage), render.table(*columns, rows=[counts]))
    if tokens:
        render.show(_token_table("Longest", "bytes", [(id, len(token), token) for id, token in tokens]))
    if usage is not None:
        rows = [(id, count, tokenizer.decode_bytes([id])) for id, count in usage.frequent]
        render.show(_token_table("Most frequent", "times", rows))


def _facts_table(tokenizer: "Tokenizer", usage: "Usage | None") -> Table:
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
    table.add_row("backend", "tiktoken" if tokenizer.pattern else "the tokenizers library")
    if tokenizer.pattern:
        table.add_row("pattern", tokenizer.pattern)
    table.add_row("fingerprint", tokenizer.fingerprint)
    if usage is not None:
        size = f"{usage.bytes:,} bytes, {usage.tokens:,} tokens"
        table.add_row("text", f"{size}: {usage.bytes_per_token:.2f} bytes per token")
        table.add_row("ids used", f"{usage.ids_used:,} ({usage.ids_used / tokenizer.vocab_size:.1%})")
    return table


def _role(tokenizer: "Tokenizer", id: int) -> str:
    """Says whether a special token starts or ends a text. Says nothing if end-of-text is the only special token."""
    if id == tokenizer.bos:
        return "  starts a text"
    return "  ends a text" if id in tokenizer.ends and (tokenizer.specials or tokenizer.bos is not None) else ""


def _token_table(title: str, unit: str, rows: list[tuple[int, int, bytes]]) -> Table:
    from gpt.text.vocabulary import to_printable

    cells = ((f"{id}", f"{count:,}", f'"{to_printable(token)}"') for id, count, token in rows)
    return render.table(">id", f">{unit}", title, rows=cells)
