"""Prints the results of ``gpt inspect``."""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from gpt.system.words import counted, percent

from . import render, terminal

if TYPE_CHECKING:
    from gpt.insight.inspect import Inspection
    from gpt.tokenizers.tokenizer import Tokenizer

LETTERS = {"previous": "p", "first": "f", "itself": "i", "same": "s", "matching": "m"}
COLOURS = {"previous": "cyan", "first": "yellow", "itself": "white", "same": "magenta", "matching": "green"}
LABEL_WIDTH, MAX_MAP_TOKENS = 13, 48  # Width of a token label, and maximum tokens of a map.
DARK, BRIGHT = (24, 28, 40), (255, 212, 121)
TOKEN_COLOURS = ("blue", "magenta", "green", "cyan", "yellow", "red")


def show_spaces(text: str) -> str:
    """Replaces a token's leading and trailing spaces by dots."""
    inner = text.strip(" ")
    leading = len(text) - len(text.lstrip(" ")) if inner else len(text)
    return "·" * leading + inner + "·" * (len(text) - leading - len(inner))


def ramp(share: float) -> tuple[int, int, int]:
    """Returns the colour of an attention weight, on a square-root scale."""
    x = min(1.0, max(0.0, share)) ** 0.5
    red, green, blue = (round(low + (high - low) * x) for low, high in zip(DARK, BRIGHT, strict=True))
    return red, green, blue


def attention(inspection: "Inspection", tokenizer: "Tokenizer") -> None:
    """Prints each head's kind, the pattern of one head, and the most likely next tokens after each block."""
    console = terminal.stdout()
    layer, head = inspection.clearest
    if len(inspection.layers) * len(inspection.heads) > 1:
        console.print(_heads_table(inspection))
    print_pattern(inspection, tokenizer, layer, head, console)
    console.print(_next_tokens_table(inspection, tokenizer))


def _heads_table(inspection: "Inspection") -> Table:
    """Returns a table of heads. A letter shows the kind of keys that a head mostly attends to."""
    from gpt.insight import inspect

    columns = ["layer", *(["window"] if any(inspection.windows) else []), *map(str, inspection.heads)]
    table = render.table(*(f">{name}" for name in columns), box=None, padding=(0, 1, 0, 0), caption_justify="left")
    find_kind = functools.partial(inspect.find_dominant_kind, inspection.here, inspection.probe)
    for at, layer in enumerate(inspection.layers):
        kinds = [find_kind(at, column) for column in range(len(inspection.heads))]
        letters = [Text(LETTERS[kind], COLOURS[kind]) if kind else Text("-", "dim") for kind in kinds]
        window = [str(inspection.windows[at] or "-")] if any(inspection.windows) else []
        table.add_row(str(layer), *window, *letters)
    legend = "  ".join(f"{LETTERS[kind]} {what}" for kind, what in inspect.KINDS.items())
    table.caption = Text(f"what heads mostly attend to:  {legend}  - no single kind", "dim")
    return table


def print_pattern(inspection: "Inspection", tokenizer: "Tokenizer", at: int, column: int, console: Console) -> None:
    """Prints a head's pattern: queries down, keys across. Without colours, prints weights as digits, in tenths."""
    from gpt.insight.inspect import KINDS, find_dominant_kind, token_text

    kind = find_dominant_kind(inspection.here, inspection.probe, at, column)
    kind_text = f": mostly {KINDS[kind]}" if kind else ""
    window = inspection.windows[at]
    window_text = "" if window is None else f" (attends to the last {counted(window, 'token')})"
    title = f"\nlayer {inspection.layers[at]}{window_text}, head {inspection.heads[column]}{kind_text}"
    console.print(Text(title, "bold"))
    max_tokens = min(MAX_MAP_TOKENS, console.width - LABEL_WIDTH - 2)
    T = len(inspection.ids)
    first = max(0, T - max_tokens)
    if first:
        console.print(Text(f"the last {T - first} of {T} tokens; -o FILE.html shows all", "dim"))
    cell_width = 2 if 2 * (T - first) + LABEL_WIDTH + 2 <= console.width else 1
    pattern = inspection.patterns[at, column]
    for query in range(first, T):
        line = Text(show_spaces(token_text(tokenizer, int(inspection.ids[query]))))
        line.truncate(LABEL_WIDTH, overflow="ellipsis")
        line.pad_left(LABEL_WIDTH - line.cell_len)
        line.append(" ")
        start = first if window is None else max(first, query - window + 1)
        line.append(cell_width * (start - first) * " ")
        for key in range(start, query + 1):
            line.append_text(_cell(float(pattern[query, key]), cell_width, console))
        console.print(line, no_wrap=True)


def _cell(share: float, width: int, console: Console) -> Text:
    if console.color_system is None:
        digit = "." if share < 0.05 else str(min(9, int(10 * share + 0.5)))
        return Text(digit.ljust(width))
    return Text(" " * width, Style(bgcolor=Color.from_rgb(*ramp(share))))


def _next_tokens_table(inspection: "Inspection", tokenizer: "Tokenizer") -> Table:
    from gpt.insight.inspect import token_text

    title = "\nnext token, as read after each block"
    table = render.table(">block", "most likely tokens and their probabilities", box=None, title=title)
    last, lens = len(inspection.lens.ids) - 1, inspection.lens
    for layer, (ids, shares) in enumerate(zip(lens.ids[:, -1], lens.probabilities[:, -1], strict=True)):
        tokens_text = Text()
        for id, share in zip(ids, shares, strict=True):
            tokens_text.append(show_spaces(token_text(tokenizer, int(id))), "bold")
            tokens_text.append(f" {percent(float(share))}   ", "dim")
        table.add_row("none" if layer == 0 else f"{layer - 1}" + (": output" if layer == last else ""), tokens_text)
    return table


def near(groups: Sequence[Mapping[str, Any]]) -> None:
    """Prints tokens with their cosines as numbers and bars."""
    console = terminal.stdout()
    for group in groups:
        console.print(Text.assemble((group["title"], "bold"), (f"   {group['note']}", "dim")))
        table = render.table(">", padding=(0, 2, 0, 0))
        for neighbor in group["near"]:
            text, cosine = Text(show_spaces(neighbor["text"])), neighbor["cosine"]
            table.add_row(text, f"{cosine:.4f}", render.bar(cosine, 30))
        console.print(table)


def tokens(data: Mapping[str, Any]) -> None:
    """Prints a text's tokens in alternating colours, or separated by bars."""
    console = terminal.stdout()
    line = Text()
    for at, piece in enumerate(data["pieces"]):
        if console.color_system is None:
            line.append(("|" if at else "") + piece)
        else:
            line.append(show_spaces(piece), f"black on {TOKEN_COLOURS[at % len(TOKEN_COLOURS)]}")
        if piece.endswith("\\n"):
            line.append("\n")
    console.print(line)
    count, size = len(data["tokens"]), data["bytes"]
    console.print(Text(f"{counted(count, 'token')}, {size:,} bytes, {size / max(1, count):.2f} each", "dim"))
    console.print(Text(" ".join(map(str, data["tokens"])), "dim"))
