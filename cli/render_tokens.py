"""What is printed of token folders."""

from typing import TYPE_CHECKING, Any

from rich.text import Text

from gpt.events import format_seconds

from . import render

if TYPE_CHECKING:
    from gpt.text.tokens import TokenFolder


def tokens_json(folder: "TokenFolder", seconds: float) -> dict[str, Any]:
    """The object of ``gpt tokenize --json``."""
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


def tokens(folder: "TokenFolder", seconds: float | None = None) -> None:
    """The end of ``gpt tokenize``, and of what makes such folders."""
    console = render.stdout()
    took = ""
    if seconds is not None:
        took = f"  ({format_seconds(seconds)}, {folder.bytes / 1e6 / max(seconds, 1e-9):,.1f} MB/s)"
    console.print(Text.assemble(("saved  ", "bold"), f"{folder.path}{took}"))
    for side, what in (("train", "train  "), ("val", "val    ")):
        counts = folder.manifest[side]
        console.print(
            Text.assemble(
                (what, "bold"),
                f"{counts['tokens']:,} tokens of {counts['bytes']:,} bytes, {counts['documents']:,} "
                f"document{'s' * (counts['documents'] != 1)}",
            )
        )
    console.print(Text.assemble(("train on it  ", "bold"), f"gpt train {folder.path}"))
