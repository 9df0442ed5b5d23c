"""``gpt sample``."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from gpt.config import SampleConfig
from gpt.errors import UserError

from . import progress, render
from .options import OUTPUT, Device, Dtype, Json, option, takes

MODEL_HELP = "A run, RUN:best, RUN:latest, RUN:step-N, a checkpoint, or a GPT-2 folder of transformers."


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
    text = _prompt(prompt, prompt_file)
    if num < 1:
        raise UserError(f"num is {num}; it must be 1 or more")
    with progress.starting(quiet=json):
        from gpt import api
    loaded = api.load(model, device=device, dtype=dtype)
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


def _prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the one place that was named."""
    if prompt is not None and file is not None:
        raise UserError("a prompt and --prompt-file were given", "give one of them")
    if file is None:
        text = prompt or ""
    else:
        try:
            data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
            text = data.decode("utf-8")
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start:,}") from None
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("the prompt is not UTF-8", "put it into a file and give --prompt-file") from None
    return text
