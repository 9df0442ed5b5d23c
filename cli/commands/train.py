"""``gpt train``."""

import contextlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from gpt.config import events
from gpt.config.settings import to_toml
from gpt.config.train import TrainConfig
from gpt.parallel import environment

from .. import inputs, processes
from ..options import Json, Quiet, config_file, option, takes
from ..show import json_results, progress, render, terminal


@takes(TrainConfig)
def train(
    settings: TrainConfig,
    given: dict[str, Any],
    words: list[str],
    text: Annotated[
        list[str] | None,
        typer.Argument(help="Files, folders, - for stdin, or names of corpora",
                       show_default="pydocs, which ships with Python"),
    ] = None,
    resume: Annotated[
        str | None,
        option(help="Continue RUN, or the newest unfinished run, exactly where it stopped", metavar="[RUN]"),
    ] = None,
    config: Annotated[Path | None, config_file(TrainConfig)] = None,
    print_config: Annotated[
        bool, option("--print-config", help="Print the settings as TOML and exit", rich_help_panel="Run")
    ] = False,
    watch: Annotated[
        bool, option("--watch", help="Show in a browser what the model writes and expects while it learns")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Train a GPT on your own text.

    gpt train book.txt
    gpt train notes/ --minutes 10 -o runs/notes
    gpt train chats.jsonl --init hf:Qwen/Qwen3-0.6B --lora-rank 8
    """
    start_time = environment.read_start_time() or time.perf_counter()
    if print_config:
        terminal.write(to_toml(asdict(settings)))
        return
    nproc = settings.nproc
    if resume is not None:
        from gpt.training import resuming

        nproc = resuming.count_processes(resume or None, given)
    if nproc > 1 and not environment.is_distributed():
        raise SystemExit(processes.start(words, nproc, start_time))
    quiet = quiet or environment.rank() > 0
    if not environment.rank():
        inputs.announce_stdin(text)
    with progress.startup_spinner(quiet):
        from gpt.training import run
    with progress.TrainDisplay(quiet) as display, contextlib.ExitStack() as until_ended:

        def listen(event: Any) -> None:
            if watch and isinstance(event, events.Opened):
                from ..show import live

                try:
                    until_ended.enter_context(live.serving(Path(event.run), render.note))
                except OSError as error:
                    render.note(f"the page cannot be served: {error}; the run continues")
            display(event)

        if resume is None:
            result = run.train(text or [], settings, listen, start_time)
        else:
            result = run.resume(resume or None, given, text or [], listen, start_time)
    if environment.rank():
        return
    render.json_line(json_results.result(result)) if json else render.result(result, quiet)
