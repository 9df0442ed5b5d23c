"""``gpt export``."""

import shlex
from typing import TYPE_CHECKING, Annotated

from gpt.config.export import ExportConfig
from gpt.system.words import counted

from .. import inputs
from ..options import Base, Device, Json, Model, Quiet, option, takes
from ..show import progress, render

if TYPE_CHECKING:
    from gpt.exporting.export import Exported


@takes(ExportConfig)
def export(
    settings: ExportConfig,
    out: Annotated[
        str,
        option("--out", "-o", metavar="PATH", help="New .gguf file, .html page for any browser, or folder to publish"),
    ],
    model: Model = None,
    base: Base = None,
    eval: Annotated[
        str | None,
        option("--eval", metavar="TEXT", help="Measure the loss on TEXT before and after"),
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
        exported = api.export(
            model, out, base=base, eval=eval, device=device, note=render.note, listen=display, **vars(settings)
        )
    if json:
        render.json_line(
            {key: value for key, value in vars(exported).items() if key != "chat"} | {"out": str(exported.out)}
        )
    else:
        _print_exported(exported)


def _print_exported(exported: "Exported") -> None:
    path = shlex.quote(str(exported.out))
    render.fact(
        "saved", f"{exported.out}  ({exported.bytes:,} bytes, {counted(exported.tensors, 'tensor')}, {exported.type})"
    )
    if exported.loss_before is not None and exported.loss_after is not None:
        change = exported.loss_after - exported.loss_before
        losses = f"{exported.loss_before:.4f} before, {exported.loss_after:.4f} after: {change:+.4f} nats per token"
        render.fact("loss", losses)
    if exported.format == "gguf":
        render.fact("more", f"llama-cli -m {path}" + ("" if exported.chat else ' -p "Once upon"'))
        from_line = f"FROM {exported.out.absolute()}"
        render.fact("", f"ollama create NAME -f Modelfile  (a file that contains: {from_line})")
    elif exported.format == "html":
        render.fact("more", f"open {path}  (in any browser, also offline)")
    else:
        render.fact("more", f"gpt chat -m {path}" if exported.chat else f'gpt sample "Once upon" -m {path}')
        render.fact("", f"hf upload OWNER/NAME {path}  (read its README.md first)")
