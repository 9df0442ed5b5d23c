"""``gpt export``."""

from typing import Annotated

from gpt.config.export import ExportConfig

from .. import inputs
from ..options import Device, Json, Model, Quiet, option, takes
from ..show import json_results, progress, render


@takes(ExportConfig)
def export(
    settings: ExportConfig,
    out: Annotated[
        str,
        option("--out", "-o", metavar="PATH", help="New .gguf file, .html page for any browser, or folder to publish"),
    ],
    model: Model = None,
    eval: Annotated[
        str | None, option("--eval", metavar="TEXT", help="Measure the loss on TEXT before and after")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    device: Device = "auto",
) -> None:
    """Export a model as a GGUF file, as a web page that runs it, or as a folder to publish.

    gpt export -m runs/book -o book.gguf
    gpt export -m runs/book -o book.html --title "My book"
    gpt export -m runs/book -o book --dtype int8 --license mit
    """
    inputs.announce_stdin([eval] if eval else None)
    with progress.startup_spinner(quiet):
        from gpt import api
    with progress.TrainDisplay(quiet) as display:
        exported = api.export(model, out, eval=eval, device=device, note=render.note, listen=display, **vars(settings))
    render.json_line(json_results.exported(exported)) if json else render.exported(exported)
