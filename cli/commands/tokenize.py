"""``gpt tokenize``."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from gpt.config.text import TokenizeConfig

from .. import inputs
from ..options import Json, Quiet, takes
from ..show import json_results, progress, render, render_data


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
    from gpt.corpus.tokenize import tokenize_texts
    from gpt.documents.documents import Skipped

    with progress.TrainDisplay(quiet) as display:
        folder = tokenize_texts(text, settings, display, sys.maxsize if json else Skipped.limit)
    data = json_results.tokens(folder, time.perf_counter() - start_time, is_resumed)
    render.json_line(data) if json else render_data.tokens(folder, data)
