"""``gpt eval``."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpt import events
from gpt.config import ReadConfig

from . import inputs, progress, render
from .options import OUTPUT, Base, Device, Dtype, Json, Model, Quiet, Threads, model_and_texts, one_of, option, takes

if TYPE_CHECKING:
    from gpt.evaluate import Window


@takes(ReadConfig)
def evaluate(
    settings: ReadConfig,
    text: Annotated[list[str], typer.Argument(help="As `gpt train` takes it; or a folder of tokens.")],
    model: Model = None,
    base: Base = None,
    stride: Annotated[
        int | None,
        option(help="Tokens from the start of one window to the next. Less than the window: windows overlap.",
                     show_default="the window"),
    ] = None,
    block_size: Annotated[
        int | None,
        option(help="Tokens in a window, up to the model's context.", show_default="the context, at most 1024"),
    ] = None,
    split: Annotated[
        str, one_of(("train", "val"), help="Of a folder of tokens: what was trained on, or what was held out.")
    ] = "val",
    per_token: Annotated[
        bool, option("--per-token", help="Each token's log-probability instead, as JSONL.", rich_help_panel=OUTPUT)
    ] = False,
    tokens: Annotated[bool, option("--tokens", hidden=True)] = False,
    json: Json = False,
    quiet: Quiet = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:  # fmt: skip
    """Measure a model on TEXT: loss, perplexity, bits per byte, in fixed windows over the whole of it."""
    model, text = model_and_texts("eval", model, text)
    per_token = per_token or tokens  # its former name
    inputs.announce(text)
    with progress.starting(quiet):
        from gpt import api
    loaded = api.load(model, base=base, device=device, dtype=dtype, threads=threads, note=render.note)
    scored = 0

    def on_window(window: "Window", losses: Any, total: int) -> None:
        nonlocal scored
        scored += len(losses)
        if per_token:
            render.token_lines(window, losses, loaded.tokenizer)
        display(events.Progress("scored", scored, total, "tokens"))

    with progress.TrainDisplay(quiet) as display:
        result = loaded.evaluate_files(text, settings, split, stride, display, on_window, block_size)
    if json:
        render.json_line(render.evaluation_json(result))
    elif not per_token:
        render.evaluation(result)
