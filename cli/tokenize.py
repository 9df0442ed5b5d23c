"""``gpt tokenize``."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from gpt.config import TokenizeConfig

from . import inputs, progress, render_data
from .options import Json, Quiet, takes


@takes(TokenizeConfig)
def tokenize(
    settings: TokenizeConfig,
    text: Annotated[list[str], typer.Argument(help="Files, folders, globs, URLs, - for stdin, or names of corpora")],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn text of any size into a token folder for `gpt train`.

    gpt tokenize corpus/ -o tokens
    gpt tokenize web.jsonl.zst -o tokens --field content --tokenizer gpt2
    gpt tokenize corpus/ -o tokens --resume
    """
    start_time = time.perf_counter()
    is_resumed = settings.resume and Path(settings.out or "").is_dir()
    inputs.announce_stdin(text)
    from gpt.text.documents import Skipped
    from gpt.text.tokenize import tokenize_texts

    Skipped.limit = sys.maxsize if json else Skipped.limit
    with progress.TrainDisplay(quiet) as display:
        folder = tokenize_texts(text, settings, display)
    render_data.tokens(folder, time.perf_counter() - start_time, json, is_resumed)
