"""``gpt train``."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gpt.config import TrainConfig
from gpt.settings import to_toml

from . import progress, render
from .options import OUTPUT, Json, Quiet, config_file, option, takes


@takes(TrainConfig)
def train(
    settings: TrainConfig,
    text: Annotated[
        list[str] | None,
        typer.Argument(help="Files, folders, - for stdin, or corpora by name. None: pydocs, which Python carries."),
    ] = None,
    config: Annotated[Path | None, config_file(TrainConfig)] = None,
    print_config: Annotated[
        bool, option("--print-config", help="Print the settings as TOML, and stop.", rich_help_panel=OUTPUT)
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a decoder on TEXT. Ends with a checkpoint, its loss on held-out text, and a sample."""
    began = time.perf_counter()
    if print_config:
        render.write(to_toml(asdict(settings)))
        return
    with progress.starting(quiet):
        from gpt.training import loop
    with progress.TrainDisplay(quiet) as display:
        result = loop.train(text or [], settings, display, began)
    if json:
        render.json_line(render.result_json(result))
    else:
        render.result(result)
