"""``gpt eval``."""

from typing import Annotated

import typer

from . import render
from .options import OUTPUT, Device, Dtype, Json, Quiet, option
from .sample import MODEL_HELP


def evaluate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    text: Annotated[list[str], typer.Argument(help="Files, folders, - for stdin, or corpora by name.")],
    stride: Annotated[
        int | None,
        option(help="Tokens from one window to the next; less than the context: overlap.",
                     show_default="the context"),
    ] = None,
    tokens: Annotated[
        bool, option("--tokens", help="Each token's log-probability instead, as JSONL.", rich_help_panel=OUTPUT)
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:  # fmt: skip
    """Measure a model on TEXT: loss, perplexity, bits a byte, in fixed windows over the whole of it."""
    with render.starting(quiet):
        from gpt import api
        from gpt.text import readers
    loaded = api.load(model, device=device, dtype=dtype)
    texts = [document.text for document in readers.read(text).documents]
    with render.Bar("scored", "tokens", quiet) as bar:
        each = render.token_lines(loaded.tokenizer) if tokens else None
        result = loaded.evaluate(texts, stride, bar.watching(each))
    if json:
        render.json_line(render.evaluation_json(result))
    elif not tokens:
        render.evaluation(result)
