"""``gpt train``."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from gpt.config import TrainConfig
from gpt.parallel import environment
from gpt.settings import to_toml

from . import inputs, processes, progress, render
from .options import OUTPUT, Json, Quiet, config_file, option, takes


@takes(TrainConfig)
def train(
    settings: TrainConfig,
    given: dict[str, Any],
    words: list[str],
    text: Annotated[
        list[str] | None,
        typer.Argument(help="Files, folders, - for stdin, or corpora by name. None: pydocs, which Python carries."),
    ] = None,
    resume: Annotated[
        str | None,
        option(
            help="Resume RUN exactly where it stopped; without RUN, the newest unfinished run. May be combined with a "
            "longer --steps, --nproc, --shard, --tensor, --recompute, --device, --threads, --micro-batch, "
            "--keep, --log.",
            metavar="[RUN]", rich_help_panel="Run", show_default="none",
        ),
    ] = None,
    config: Annotated[Path | None, config_file(TrainConfig)] = None,
    print_config: Annotated[
        bool, option("--print-config", help="Print the settings as TOML, and stop.", rich_help_panel=OUTPUT)
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Train a decoder on TEXT. Ends with a checkpoint, its loss on held-out text, and a sample."""
    began = environment.began() or time.perf_counter()
    if print_config:
        render.write(to_toml(asdict(settings)))
        return
    nproc = settings.nproc
    if resume is not None:
        from gpt.training import resuming

        nproc = resuming.processes_of(resume or None, given)
    if nproc > 1 and not environment.is_one_of_many():
        raise SystemExit(processes.start(words, nproc, began))
    quiet = quiet or environment.rank() > 0
    if not environment.rank():
        inputs.announce(text)
    with progress.starting(quiet):
        from gpt.training import run
    with progress.TrainDisplay(quiet) as display:
        if resume is None:
            result = run.train(text or [], settings, display, began)
        else:
            result = run.resume(resume or None, given, text or [], display, began)
    if environment.rank():
        return
    if json:
        render.json_line(render.result_json(result))
    else:
        render.result(result)
