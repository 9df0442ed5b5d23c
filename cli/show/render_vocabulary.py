"""Prints the results of ``gpt tokenizer``."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from gpt.config.events import format_seconds

from . import render

if TYPE_CHECKING:
    from gpt.corpus.vocabulary import Usage
    from gpt.tokenizers.tokenizer import Tokenizer


def write_bytes(data: bytes) -> None:
    """Writes bytes to stdout unchanged, or as text on a terminal."""
    if sys.stdout.isatty():
        render.write(data.decode("utf-8", "backslashreplace"))
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def training_result(tokenizer: "Tokenizer", out: Path, sampled: int, total: int, seconds: float, as_json: bool) -> None:
    """Prints the result of ``gpt tokenizer train``."""
    if as_json:
        render.json_line(
            {
                "out": str(out),
                "vocab_size": tokenizer.vocab_size,
                "end_of_text": tokenizer.eot,
                "specials": dict(tokenizer.specials),
                "fingerprint": tokenizer.fingerprint,
                "sampled_bytes": sampled,
                "bytes": total,
                "seconds": round(seconds, 2),
            }
        )
        return
    sample = f"{sampled:,} bytes" if sampled == total else f"{sampled:,} of {total:,} bytes"
    render.fact("saved", f"{out}  ({tokenizer.vocab_size:,} ids from {sample} in {format_seconds(seconds)})")
    render.fact("more", f"gpt tokenizer show {shlex.quote(str(out))}")


def vocabulary(tokenizer: "Tokenizer", longest: int, usage: "Usage | None", as_json: bool) -> None:
    """Prints a vocabulary, and how much of it a text uses."""
    from gpt.corpus import vocabulary
    from gpt.corpus.vocabulary import to_printable

    tokens = vocabulary.find_longest(tokenizer, longest)
    if as_json:
        values = {
            "name": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "end_of_text": tokenizer.eot,
            "specials": dict(tokenizer.specials),
            "bos": tokenizer.bos,
            "ends": sorted(tokenizer.ends),
            "pattern": tokenizer.pattern,
            "fingerprint": tokenizer.fingerprint,
            "longest": [{"id": id, "bytes": len(token), "text": to_printable(token)} for id, token in tokens],
        }
        if usage is not None:
            values |= {key: getattr(usage, key) for key in ("bytes", "tokens", "bytes_per_token", "ids_used")}
        render.json_line(values)
        return
    console = render.stdout()
    console.print(_facts_table(tokenizer, usage))
    lengths = vocabulary.lengths(tokenizer)
    table = render.table("Bytes per token", *(f">{column}" for column in lengths))
    table.add_row("tokens", *(f"{count:,}" for count in lengths.values()))
    console.print(table)
    if tokens:
        console.print(_token_table("Longest", "bytes", [(id, len(token), token) for id, token in tokens]))
    if usage is not None:
        rows = [(id, count, tokenizer.decode_bytes([id])) for id, count in usage.frequent]
        console.print(_token_table("Most frequent", "times", rows))


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
    from gpt.corpus.vocabulary import to_printable

    table = render.table(">id", f">{unit}", title)
    for id, count, token in rows:
        table.add_row(f"{id}", f"{count:,}", f'"{to_printable(token)}"')
    return table
