"""Prints with rich: results to stdout, notes and errors to stderr."""

import secrets
import shlex
import sys
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from gpt.config.events import format_seconds
from gpt.system.errors import shorten
from gpt.system.words import as_json, counted, percent

from . import terminal

if TYPE_CHECKING:
    from gpt.decoding.write import Piece
    from gpt.exporting.export import Exported
    from gpt.insight.evaluate import Evaluation
    from gpt.training.context import Result


def show(*parts: RenderableType) -> None:
    """Prints parts of a result to stdout."""
    console = terminal.stdout()
    for part in parts:
        console.print(part)


def json_line(*objects: Mapping[str, Any]) -> None:
    """Prints each object as one line of JSON. NaN and infinities become null."""
    ascii_only = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    for values in objects:
        terminal.write(as_json(values, ascii=ascii_only) + "\n", is_json=True)


def error(message: str, hint: str) -> None:
    """Prints an error message and its hint."""
    console = terminal.stderr()
    for label, style, text in (("error: ", "bold red", message), ("hint: ", "bold", hint)):
        if text:
            line = Text.assemble((label, style), " ".join(console.escape(shorten(text)).split()))
            console.print(line, soft_wrap=_can_be_copied(label))


def trace(error: BaseException) -> None:
    """Prints an exception with its traceback, for ``--debug``."""
    terminal.stderr().print(Text("".join(traceback.format_exception(error))), end="")


def note(text: str) -> None:
    """Prints a dim line on stderr."""
    console = terminal.stderr()
    console.print(Text(console.escape(shorten(text)), "dim"))


def bar(share: float, width: int) -> Text:
    """Returns a bar that fills a ``share`` (0 to 1) of ``width`` columns."""
    mark = "█" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
    return Text(mark * round(width * min(1.0, max(0.0, share))), "blue")


def excerpt(text: str, lines: int) -> str:
    """Returns the first nonblank lines of a text, indented."""
    nonblank = [line for line in text.strip().splitlines() if line.strip()][:lines]
    return "\n".join("    " + line for line in nonblank)


def sample_text(prompt: str, text: str, lines: int) -> Text:
    """Returns the first lines of a sample, with its prompt dimmed."""
    styled, start = Text(excerpt(text, lines), "italic"), excerpt(prompt, lines)
    if styled.plain.startswith(start):
        styled.stylize("dim", 0, len(start))
    return styled


def fact(label: str, text: str) -> None:
    """Prints a labelled line of a result."""
    terminal.stdout().print(Text.assemble((f"{label:<5}  ", "bold"), text), soft_wrap=_can_be_copied(label))


def _can_be_copied(label: str) -> bool | None:
    """Whether to leave breaking a line to the terminal, so that a command in it can be copied whole."""
    return True if label in ("hint: ", "more") else None


def table(*columns: str, title: str = "", rows: Iterable[Sequence[RenderableType]] = (), **settings: Any) -> Table:
    """Returns a table. A leading ``>`` right-aligns a column. A table without names of columns has no header."""
    has_header = any(column != ">" for column in columns)
    settings = {"box": box.SIMPLE_HEAD if has_header else None, "show_header": has_header, "pad_edge": False} | settings
    grid = Table(title=Text(title, "bold") if title else None, title_justify="left", **settings)
    for column in columns:
        grid.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    for row in rows:
        grid.add_row(*row)
    return grid


def key_value_table(rows: Mapping[str, str]) -> Table:
    """Returns a table of labelled values, without empty values."""
    return table(rows=((Text(key, "bold"), value) for key, value in rows.items() if value))


def percent_of_peak(mfu: float | None) -> str:
    """Returns an MFU as a suffix, such as `` (41.3 % MFU)``, or an empty string if the MFU is unknown."""
    return "" if mfu is None else f" ({percent(mfu, 1)} MFU)"


def result(result: "Result", quiet: bool = False) -> None:
    """Prints the result of ``gpt train``; if ``quiet``, without yardsticks."""
    throughput = f"{result.tokens_per_second:,.0f} tokens/s{percent_of_peak(result.mfu)}"
    training = f"of which {format_seconds(result.step_seconds)} training at {throughput}"
    summary = f"{counted(result.steps, 'step')} in {format_seconds(result.seconds)}, {training}"
    fact("saved", f"{result.checkpoint}  ({summary})")
    if result.val_loss is not None and result.bits_per_byte is not None:
        loss = f"{result.val_loss:.4f} nats per token, {result.bits_per_byte:.4f} bits per byte, on "
        fact("loss", loss + (f"{result.val_tokens:,} tokens of " if result.val_tokens else "") + "held-out text")
    if (rewards := result.rewards) is not None and rewards.reward is not None:
        count = f"{result.val_tokens:,} held-out prompts"
        fact("reward", f"{rewards.reward:.4f} on {count} (greedy, {rewards.answer_tokens:.1f} tokens each)")
    elif rewards is not None:
        fact("loss", f"{result.val_loss:.4f} nats per preference, on {result.val_tokens:,} held-out preferences")
        means = f"chosen {rewards.chosen_reward:.3f}, rejected {rewards.rejected_reward:.3f}"
        fact("reward", f"accuracy {rewards.accuracy:.1%}, margin {rewards.margin:.3f} ({means})")
    if result.yardsticks is not None and not quiet:
        fact("xz", str(result.yardsticks))
    if result.verdict and not quiet:
        fact("model", result.verdict)
    if result.answers is not None:
        held_out = "" if result.held_out_answers is None else f" trained on, {result.held_out_answers} held out"
        fact("pairs", f"answered exactly (greedy): {result.answers}{held_out}")
    sample = sample_text(result.prompt, result.sample, 8)
    show(Text.assemble(("sample", "bold"), f" of {result.checkpoint.name}\n", sample))
    is_short = result.answers is not None and len(result.prompt) <= 60 and result.prompt.isprintable()
    prompt = f"{shlex.quote(result.prompt)} --greedy" if is_short else '"Once upon"'
    command = "gpt chat" if result.chat else f"gpt sample {prompt}"
    fact("more", f"{command} -m {shlex.quote(str(result.run))}")


def draw_seed(announce: bool, model: Path | None = None) -> int:
    """Draws a random seed. With ``announce``, prints it and the model on stderr."""
    seed = secrets.randbelow(2**31)
    if announce:
        note(f"{f'{model}, ' if model else ''}seed {seed}")
    return seed


def stream(pieces: Iterable["Piece"], prompts: Sequence[str], num: int, echo: bool) -> None:
    """Prints texts as they are generated, with headings if there are several."""
    current = None
    for piece in pieces:
        if (piece.prompt, piece.index) != current:
            current = piece.prompt, piece.index
            heading = [f"prompt {piece.prompt + 1} of {len(prompts)}"] if len(prompts) > 1 else []
            heading += [f"{piece.index + 1} of {num}"] if num > 1 else []
            terminal.write(f"--- {', '.join(heading)} ---\n" if heading else "")
            terminal.write(prompts[piece.prompt] if echo else "")
        terminal.write(piece.text + ("\n" if piece.sample is not None else ""))


def context_notes(overflows: Collection[tuple[int, bool]], size: int, chose_length: bool) -> None:
    """Prints notes about samples that exceeded the context of ``size`` tokens. ``overflows`` has the number of tokens
    dropped from each prompt, and whether its text outgrew the context. The default length can exceed it, which is no
    news."""
    if dropped := max((dropped for dropped, _ in overflows), default=0):
        note(f"the prompt has {dropped + size:,} tokens, but the context only {size:,}: dropped the first {dropped:,}")
    if chose_length and any(outgrew for _, outgrew in overflows):
        note(f"the text outgrew the context of {size:,} tokens: earlier tokens were dropped")


def evaluation(result: "Evaluation", quiet: bool = False) -> None:
    """Prints the result of ``gpt eval``; if ``quiet``, without yardsticks."""
    rows = [
        ("loss", f"{result.loss:.4f}", "nats per token"),
        ("perplexity", f"{result.perplexity:,.2f}", "per token: e to the loss"),
        ("bits per byte", f"{result.bits_per_byte:.4f}", "comparable between tokenizers"),
        ("word perplexity", f"{result.word_perplexity:,.2f}", "per word, split at white space"),
        ("text", f"{result.tokens:,}", f"tokens predicted; {result.bytes:,} bytes, {result.words:,} words"),
        ("windows", f"{result.block_size:,}", f"tokens each, one every {result.stride:,}"),
    ]
    if result.yardsticks is not None and not quiet:
        number, _, words = str(result.yardsticks).partition(" ")
        rows.append(("xz", number, words))
    if result.verdict and not quiet:
        rows.append(("model", "", result.verdict))
    show(table(rows=rows))


def exported(exported: "Exported") -> None:
    """Prints the result of ``gpt export``."""
    path, tensors = shlex.quote(str(exported.out)), counted(exported.tensors, "tensor")
    fact("saved", f"{exported.out}  ({exported.bytes:,} bytes, {tensors}, {exported.type})")
    if exported.loss_before is not None and exported.loss_after is not None:
        change = exported.loss_after - exported.loss_before
        losses = f"{exported.loss_before:.4f} before, {exported.loss_after:.4f} after"
        fact("loss", f"{losses}: {change:+.4f} nats per token")
    if exported.format == "gguf":
        fact("more", f"llama-cli -m {path}" + ("" if exported.chat else ' -p "Once upon"'))
        from_line = f"FROM {exported.out.absolute()}"
        fact("", f"ollama create NAME -f Modelfile  (a file that contains: {from_line})")
    elif exported.format == "html":
        fact("more", f"open {path}  (in any browser, also offline)")
    else:
        fact("more", f"gpt chat -m {path}" if exported.chat else f'gpt sample "Once upon" -m {path}')
        fact("", f"hf upload OWNER/NAME {path}  (read its README.md first)")
