"""``gpt export``."""

from typing import Annotated

import typer

from gpt.export_config import ExportConfig

from . import inputs, progress, render, render_export
from .options import MODEL_HELP, Base, Device, Json, Quiet, option, takes


@takes(ExportConfig)
def export(
    settings: ExportConfig,
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    out: Annotated[
        str, option("--out", "-o", help="A new FILE.gguf for llama.cpp and ollama, or a new folder for publishing.")
    ],
    base: Base = None,
    eval: Annotated[
        str | None,
        option("--eval", metavar="TEXT", help="Measure the loss on TEXT before and after.", show_default="none"),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    device: Device = "auto",
) -> None:
    """Write a model for others: a GGUF file, or a folder with a model card, in any dtype down to int4."""
    inputs.announce([eval] if eval else None)
    with progress.starting(quiet):
        from gpt import api
    with progress.TrainDisplay(quiet) as display:
        done = api.export(
            model, out, base=base, eval=eval, device=device, note=render.note, listen=display, **vars(settings)
        )
    if json:
        render.json_line({key: value for key, value in vars(done).items() if key != "chat"} | {"out": str(done.out)})
    else:
        render_export.exported(done)
