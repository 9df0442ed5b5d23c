"""``gpt sample``."""

from pathlib import Path
from typing import Annotated

import typer

from gpt.config import SampleConfig
from gpt.errors import UserError

from . import progress, render
from .options import OUTPUT, Device, Dtype, Json, given_text, option, takes

MODEL_HELP = (
    "A run, RUN:best, RUN:latest, RUN:step-N, a checkpoint, a GPT-2 folder of transformers, or hf:NAME of the hub."
)


@takes(SampleConfig)
def sample(
    settings: SampleConfig,
    prompt: Annotated[
        str | None, typer.Argument(help="What the text begins with. None: it begins like a document.")
    ] = None,
    model: Annotated[
        str | None, option("--model", "-m", help=MODEL_HELP, show_default="best of the newest run in runs/")
    ] = None,
    prompt_file: Annotated[
        Path | None, option(help="Read the prompt from a file; - is stdin.", show_default="none")
    ] = None,
    num: Annotated[int, option("--num", "-N", help="How many samples.", rich_help_panel="Text")] = 1,
    seed: Annotated[
        int | None,
        option(help="Same seed, same text.", show_default="drawn and printed", rich_help_panel="Text"),
    ] = None,
    no_echo: Annotated[bool, option("--no-echo", help="Do not print the prompt.", rich_help_panel=OUTPUT)] = False,
    json: Json = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Let a model write on after PROMPT."""
    text = given_text(prompt, prompt_file, "prompt", "--prompt-file")
    if num < 1:
        raise UserError(f"num is {num}; it must be 1 or more")
    with progress.starting(quiet=json):
        from gpt import api
    loaded = api.load(model, device=device, dtype=dtype, note=render.note)
    drawn = not (settings.greedy or settings.temperature == 0)
    if seed is None:
        seed = render.draw_seed(announce=drawn and not json)
    if not drawn and (settings.top_k or settings.top_p):
        render.note("--top-k and --top-p choose what to draw from; greedy draws nothing, so they are not used")
    slid = False
    for index in range(num):
        writing = loaded.write(text, settings, seed, index)
        if json:
            list(writing)
            render.json_line(render.sample_json(writing.sample, index, text, seed if drawn else None))
        else:
            render.stream(writing, "" if no_echo else text, index, num)
        slid = slid or writing.sample.slid
    if slid:
        size = loaded.model.config.block_size
        render.note(f"the text outgrew the context of {size:,} tokens: what stood further back was forgotten")
