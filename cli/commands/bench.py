"""``gpt bench``."""

from typing import Annotated

from gpt.config.bench import BenchConfig

from ..options import Device, Dtype, Json, Threads, option, takes
from ..show import json_results, progress, render


@takes(BenchConfig)
def bench(
    settings: BenchConfig,
    model: Annotated[
        str | None,
        option("--model", "-m", metavar="MODEL", help="A preset (with random weights), or a model as in `gpt sample`",
               show_default="best of the newest run"),
    ] = None,
    json: Json = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:  # fmt: skip
    """Measure generation speed, compared with memory bandwidth.

    gpt bench
    gpt bench -m gpt2 --dtype int8
    """
    with progress.startup_spinner(quiet=json):
        from gpt import api
    measured = api.bench(model, settings, device=device, dtype=dtype, threads=threads, note=render.note)
    render.json_line(json_results.speed(measured)) if json else render.speed(measured)
