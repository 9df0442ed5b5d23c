"""Prints with rich: results to stdout, notes and errors to stderr."""

import contextlib
import os
import secrets
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from gpt.config.events import format_seconds
from gpt.system.errors import shorten
from gpt.system.words import as_json, counted

if TYPE_CHECKING:
    from gpt.api import Measured
    from gpt.decoding.logits import Token
    from gpt.decoding.write import Piece, Sample
    from gpt.insight.evaluate import Evaluation, Window
    from gpt.tokenizers.tokenizer import Tokenizer
    from gpt.training.context import Result


# Characters that a terminal interprets or hides: control codes except line feed and tab, and Unicode's characters for
# line breaks, text direction and annotation. File names, JSON keys and generated text can contain such characters.
_CONTROL_CODES = (*range(9), *range(11, 32), *range(127, 160), 0x061C, *range(0x2028, 0x202F), *range(0x2066, 0x2070),
           *range(0xFFF9, 0xFFFC))  # fmt: skip
_ESCAPES = {code: f"\\u{code:04x}" for code in _CONTROL_CODES}  # JSON uses the same escapes.
_SYMBOLS = _ESCAPES | {code: chr(0x2400 + code) for code in range(32) if code in _CONTROL_CODES} | {127: "␡"}


class _SafeConsole(Console):
    """A console that shows control characters in text as symbols. It breaks lines between words, and only on a
    terminal."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.soft_wrap = not self.is_terminal

    def escape(self, text: str) -> str:
        """Replaces control characters by symbols on a terminal. Leaves text unchanged in a file or pipe."""
        return text.translate(_SYMBOLS) if self.is_terminal else text

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escapes all segments except rich's own control codes."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(self.escape(segment.text), segment.style)


class _StderrConsole(_SafeConsole):
    """A console on stderr that is silent after a write error: a closed pipe or terminal, or a full disk."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Silences stderr. Rich's own method would exit."""
        self.quiet = True
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def stderr() -> _SafeConsole:
    """Returns a console for progress, notes and errors."""
    return _StderrConsole(stderr=True, highlight=False, markup=False, emoji=False)


def stdout() -> _SafeConsole:
    """Returns a console for results, 160 columns wide in a file or pipe."""
    width = None if sys.stdout.isatty() else 160
    return _SafeConsole(highlight=False, width=width, markup=False, emoji=False)


def make_output_safe() -> None:
    """Makes stdout and stderr escape characters that their encoding lacks, instead of raising.

    If stdout or stderr is closed at startup, replaces it with the null device. The command then works and returns 0,
    as a Python program with ``print`` does. The null device also takes the free file descriptor: otherwise a file
    opened later would take the descriptor and receive the output of libraries.
    """
    try:
        os.fstat(0)
    except OSError:  # `sys.stdin` remains None, so commands can report that there is no stdin.
        os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            null_device = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(null_device.fileno(), True)
            setattr(sys, name, null_device)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def bar(share: float, width: int, console: Console) -> Text:
    """Returns a bar that fills a ``share`` (0 to 1) of ``width`` columns."""
    mark = "█" if (console.encoding or "").lower().startswith("utf") else "#"
    return Text(mark * round(width * min(1.0, max(0.0, share))), "blue")


def write(text: str) -> None:
    """Writes text to stdout and flushes it. On a terminal, control characters become symbols."""
    sys.stdout.write(text.translate(_SYMBOLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def json_line(values: Mapping[str, Any]) -> None:
    """Prints an object as one line of JSON. NaN and infinities become null."""
    ascii_only = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    line = as_json(values, ascii=ascii_only)
    write((line.translate(_ESCAPES) if sys.stdout.isatty() else line) + "\n")


def error(message: str, hint: str) -> None:
    """Prints an error message and its hint."""
    console = stderr()
    for label, style, text in (("error: ", "bold red", message), ("hint: ", "bold", hint)):
        if text:
            line = Text.assemble((label, style), " ".join(console.escape(shorten(text)).split()))
            console.print(line, soft_wrap=_can_be_copied(label))


def trace(error: BaseException) -> None:
    """Prints an exception with its traceback, for ``--debug``."""
    stderr().print(Text("".join(traceback.format_exception(error))), end="")


def note(text: str) -> None:
    """Prints a dim line on stderr."""
    console = stderr()
    console.print(Text(console.escape(shorten(text)), "dim"))


def excerpt(text: str, lines: int = 5) -> str:
    """Returns the first nonblank lines of a text, indented."""
    nonblank = [line for line in text.strip().splitlines() if line.strip()][:lines]
    return "\n".join("    " + line for line in nonblank)


def sample_text(prompt: str, text: str, lines: int = 5) -> Text:
    """Returns the first lines of a sample, with its prompt dimmed."""
    styled, start = Text(excerpt(text, lines), "italic"), excerpt(prompt, lines)
    if styled.plain.startswith(start):
        styled.stylize("dim", 0, len(start))
    return styled


def fact(label: str, text: str, console: Console | None = None) -> None:
    """Prints a labelled line of a result."""
    (console or stdout()).print(Text.assemble((f"{label:<5}  ", "bold"), text), soft_wrap=_can_be_copied(label))


def _can_be_copied(label: str) -> bool | None:
    """Whether to leave breaking a line to the terminal, so that a command in it can be copied whole."""
    return True if label in ("hint: ", "more") else None


def table(*columns: str, title: str = "", **settings: Any) -> Table:
    """Returns a table. A leading ``>`` right-aligns a column. A table without columns has no header."""
    settings = {"box": box.SIMPLE_HEAD if columns else None, "show_header": bool(columns), "pad_edge": False} | settings
    grid = Table(title=Text(title, "bold") if title else None, title_justify="left", **settings)
    for column in columns:
        grid.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return grid


def key_value_table(rows: Mapping[str, str]) -> Table:
    """Returns a table of labelled values, without empty values."""
    grid = table()
    for key, value in rows.items():
        if value:
            grid.add_row(Text(key, "bold"), value)
    return grid


def percent_of_peak(mfu: float | None) -> str:
    """Returns an MFU as a suffix, such as `` (41.3% MFU)``, or an empty string if the MFU is unknown."""
    return "" if mfu is None else f" ({mfu:.1%} MFU)"


def result_json(result: "Result") -> dict[str, Any]:
    """Returns the object of ``gpt train --json``."""
    values = asdict(result)
    for key in ("mfu", "answers", "held_out_answers", "chat"):
        del values[key]
    rounded = {"tokens_per_second": round(result.tokens_per_second, 1), "step_seconds": round(result.step_seconds, 3)}
    paths = {"run": str(result.run), "checkpoint": str(result.checkpoint)}
    return values | paths | rounded | {"verdict": result.verdict}


def result(result: "Result", quiet: bool = False, console: Console | None = None) -> None:
    """Prints the result of ``gpt train``; if ``quiet``, without yardsticks."""
    throughput = f"{result.tokens_per_second:,.0f} tokens/s{percent_of_peak(result.mfu)}"
    training = f"of which {format_seconds(result.step_seconds)} training at {throughput}"
    summary = f"{counted(result.steps, 'step')} in {format_seconds(result.seconds)}, {training}"
    fact("saved", f"{result.checkpoint}  ({summary})", console)
    if result.val_loss is not None and result.bits_per_byte is not None:
        loss = f"{result.val_loss:.4f} nats per token, {result.bits_per_byte:.4f} bits per byte, on "
        loss += f"{result.val_tokens:,} tokens of held-out text" if result.val_tokens else "held-out text"
        fact("loss", loss, console)
    if result.yardsticks is not None and not quiet:
        fact("xz", str(result.yardsticks), console)
    if result.verdict and not quiet:
        fact("model", result.verdict, console)
    if result.answers is not None:
        held_out = "" if result.held_out_answers is None else f" trained on, {result.held_out_answers} held out"
        fact("pairs", f"answered exactly (greedy): {result.answers}{held_out}", console)
    sample = sample_text(result.prompt, result.sample, 12)
    (console or stdout()).print(Text.assemble(("sample", "bold"), f" of {result.checkpoint.name}\n", sample))
    is_short = result.answers is not None and len(result.prompt) <= 60 and result.prompt.isprintable()
    prompt = f"{shlex.quote(result.prompt)} --greedy" if is_short else '"Once upon"'
    command = "gpt chat" if result.chat else f"gpt sample {prompt}"
    fact("more", f"{command} -m {shlex.quote(str(result.run))}", console)


def draw_seed(announce: bool, model: Path | None = None) -> int:
    """Draws a random seed. With ``announce``, prints it and the model on stderr."""
    seed = secrets.randbelow(2**31)
    if announce:
        note(f"{f'{model}, ' if model else ''}seed {seed}")
    return seed


@dataclass
class Overflow:
    """How far samples exceeded the context."""

    dropped: int = 0  # Maximum number of tokens truncated from a prompt.
    slid: bool = False  # Whether a text outgrew the context.

    def add(self, sample: "Sample") -> None:
        """Records a sample."""
        self.dropped = max(self.dropped, sample.dropped)
        self.slid |= sample.slid

    def collect(self, pieces: Iterable["Piece"]) -> Iterator["Piece"]:
        """Yields the pieces and records their samples."""
        for piece in pieces:
            yield piece
            if piece.sample is not None:
                self.add(piece.sample)


def stream(pieces: Iterable["Piece"], prompts: Sequence[str], num: int, echo: bool) -> None:
    """Prints texts as they are generated, with headings if there are several."""
    current = None
    for piece in pieces:
        if (piece.prompt, piece.index) != current:
            current = piece.prompt, piece.index
            heading = [f"prompt {piece.prompt + 1} of {len(prompts)}"] if len(prompts) > 1 else []
            heading += [f"{piece.index + 1} of {num}"] if num > 1 else []
            write(f"--- {', '.join(heading)} ---\n" if heading else "")
            write(prompts[piece.prompt] if echo else "")
        write(piece.text + ("\n" if piece.sample is not None else ""))


def context_notes(overflow: Overflow, size: int, chose_length: bool) -> None:
    """Prints notes about samples that exceeded the context of ``size`` tokens. The default length can exceed it, which
    is no news."""
    if dropped := overflow.dropped:
        note(f"the prompt has {dropped + size:,} tokens, but the context only {size:,}: dropped the first {dropped:,}")
    if overflow.slid and chose_length:
        note(f"the text outgrew the context of {size:,} tokens: earlier tokens were dropped")


def sample_json(piece: "Piece", prompt: str, seed: int | None, tokenizer: "Tokenizer") -> dict[str, Any]:
    """Returns an object of ``gpt sample --json`` from the last piece of a text."""
    sample = piece.sample
    assert sample is not None
    values: dict[str, Any] = {"prompt_index": piece.prompt, "index": piece.index, "prompt": prompt}
    values |= {key: getattr(sample, key) for key in ("text", "tokens", "logprob", "finish_reason")}
    values["seed"] = seed
    if sample.score is not None:
        values["score"] = sample.score
    for name in ("logprobs", "prompt_logprobs"):
        if (tokens := getattr(sample, name)) is not None:
            values[name] = [_token_json(token, tokenizer) for token in tokens]
    return values


def _token_json(token: "Token", tokenizer: "Tokenizer") -> dict[str, Any]:
    values = {"token": token.id, "text": tokenizer.decode([token.id]), "logprob": token.logprob}
    top = [{"token": id, "text": tokenizer.decode([id]), "logprob": logprob} for id, logprob in token.top]
    return values | ({"top": top} if top else {})


def evaluation_json(result: "Evaluation") -> dict[str, Any]:
    """Returns the object of ``gpt eval --json``."""
    keys = ("loss", "perplexity", "bits_per_byte", "word_perplexity", "tokens", "bytes", "words", "stride",
            "block_size")  # fmt: skip
    comparison = {"yardsticks": result.yardsticks and asdict(result.yardsticks), "trend": result.trend}
    return {key: getattr(result, key) for key in keys} | comparison | {"verdict": result.verdict}


def evaluation(result: "Evaluation", quiet: bool = False) -> None:
    """Prints the result of ``gpt eval``; if ``quiet``, without yardsticks."""
    rows = table()
    rows.add_row("loss", f"{result.loss:.4f}", "nats per token")
    rows.add_row("perplexity", f"{result.perplexity:,.2f}", "per token: e to the loss")
    rows.add_row("bits per byte", f"{result.bits_per_byte:.4f}", "comparable between tokenizers")
    rows.add_row("word perplexity", f"{result.word_perplexity:,.2f}", "per word, split at white space")
    rows.add_row("text", f"{result.tokens:,}", f"tokens predicted; {result.bytes:,} bytes, {result.words:,} words")
    rows.add_row("windows", f"{result.block_size:,}", f"tokens each, one every {result.stride:,}")
    if result.yardsticks is not None and not quiet:
        rows.add_row("xz", *str(result.yardsticks).split(" ", 1))
    if result.verdict and not quiet:
        rows.add_row("model", "", result.verdict)
    stdout().print(rows)


def speed_json(measured: "Measured") -> dict[str, Any]:
    """Returns the object of ``gpt bench --json``."""
    values = {key: getattr(measured, key) for key in ("name", "parameters", "device", "dtype", "compiled")}
    return values | asdict(measured.settings) | asdict(measured.speed)


def speed(measured: "Measured") -> None:
    """Prints the result of ``gpt bench``."""
    metrics, settings = measured.speed, measured.settings
    rows = table()
    details = f"{measured.parameters:,} parameters, {measured.device}, {measured.dtype}"
    rows.add_row("model", measured.name, details + (", compiled" if measured.compiled else ""))
    sequences = f"{settings.batch} sequences" if settings.batch > 1 else "one sequence"
    prefill, decoding = metrics.prefill_tokens_per_second, metrics.decode_tokens_per_second
    rows.add_row("prefill", f"{prefill:,.0f}", f"tokens/s: {settings.prompt_tokens} of {sequences}")
    rows.add_row("first token", f"{1000 * metrics.first_token_seconds:,.1f}", "ms after the prompt")
    rows.add_row("decoding", f"{decoding:,.1f}", f"tokens/s: {settings.new_tokens} of {sequences}")
    share = f"% of this memory's {metrics.bandwidth_bytes_per_second / 1e9:,.1f} GB/s; a step reads "
    rows.add_row("bandwidth", f"{100 * metrics.bandwidth_share:.0f}", share + f"{metrics.read_bytes / 1e6:,.0f} MB")
    rows.add_row("memory", f"{metrics.memory_bytes / 1e6:,.0f}", "MB at peak")
    stdout().print(rows)


def token_lines(window: "Window", losses: Any, tokenizer: "Tokenizer") -> None:
    """Prints a line of JSON for each scored token of a window."""
    for at, loss in enumerate(losses.tolist(), window.skipped):
        id = int(window.y[at])
        location = {"document": window.document, "position": window.start + at + 1}
        json_line({**location, "token": id, "text": tokenizer.decode([id]), "logprob": -loss})
