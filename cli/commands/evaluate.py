"""``gpt eval``."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpt.config.text import ReadConfig

from .. import inputs
from ..options import Device, Dtype, Json, Model, Quiet, Threads, one_of, option, takes
from ..show import json_results, progress, render

if TYPE_CHECKING:
    from gpt.insight.evaluate import Window


@takes(ReadConfig)
def evaluate(
    settings: ReadConfig,
    text: Annotated[list[str], typer.Argument(help="Files, folders or corpora, as in `gpt train`, or token folders")],
    model: Model = None,
    stride: Annotated[
        int | None,
        option(help="Tokens between the starts of windows; fewer than a window: they overlap",
               show_default="the window"),
    ] = None,
    block_size: Annotated[
        int | None,
        option(help="Tokens per window, up to the context length", show_default="the context length, at most 1,024"),
    ] = None,
    split: Annotated[
        str, one_of(("train", "val"), help="Part of a token folder: training or held-out text")
    ] = "val",
    per_token: Annotated[
        bool, option("--per-token", help="Print each token's log-probability as JSON lines instead")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:  # fmt: skip
    """Measure a model on a text: loss, perplexity and bits per byte.

    gpt eval chapter.txt
    gpt eval chapter.txt -m runs/book --stride 128
    gpt eval wikitext-2 -m hf:openai-community/gpt2 --json
    """
    inputs.announce_stdin(text)
    with progress.startup_spinner(quiet):
        from gpt import api
    loaded = api.load(model, device=device, dtype=dtype, threads=threads, note=render.note)

    def print_tokens(window: "Window", losses: Any, total: int) -> None:
        for values in json_results.scored_tokens(window, losses, loaded.tokenizer):
            render.json_line(values)

    on_window = print_tokens if per_token else None
    with progress.TrainDisplay(quiet) as display:
        result = loaded.evaluate_files(text, settings, split, stride, display, on_window, block_size, not per_token)
    if json:
        render.json_line(json_results.evaluation(result))
    elif not per_token:
        render.evaluation(result, quiet)
