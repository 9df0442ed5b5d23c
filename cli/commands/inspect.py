"""``gpt inspect attention|neighbors``."""

from typing import TYPE_CHECKING, Annotated

import typer

from .. import inputs
from ..options import Device, Json, Model, OutPage, PromptFile, option
from ..show import page, progress, render

if TYPE_CHECKING:
    from gpt.api import LanguageModel

app = typer.Typer(help="Look inside a model: attention and embeddings.")


@app.command("attention")
def attention(
    prompt: Annotated[str | None, typer.Argument(help="Text for the model to read")] = None,
    prompt_file: PromptFile = None,
    layer: Annotated[int | None, option(help="Show only this layer, counted from 0", show_default="all")] = None,
    head: Annotated[
        int | None,
        option(help="Show only this head, counted from 0", show_default="all; in a terminal, the clearest one"),
    ] = None,
    model: Model = None,
    out: OutPage = None,
    json: Json = False,
    device: Device = "auto",
) -> None:
    """Show what each head attends to, and what each layer would predict.

    gpt inspect attention "Once upon a time"
    gpt inspect attention "Once upon a time" -m runs/book -o attention.html
    """
    words = inputs.read_text(prompt, prompt_file, "prompt", "--prompt-file")
    page.check_out(out)
    loaded = _load(model, device, json)
    from gpt.insight import inspect

    from ..show import json_inspect, render_inspect

    ids = loaded.tokenizer.prompt(words) if words else []  # Encode as for sampling.
    inspection = inspect.inspect_prompt(loaded.model, ids, loaded.tokenizer, layer, head)
    if inspection.dropped:
        shown = f"showing the last {len(inspection.ids):,}, which fit the context"
        render.note(f"the prompt has {len(ids):,} tokens; {shown}")
    name, tokenizer = str(loaded.path), loaded.tokenizer
    page.show(
        "attention", f"attention: {name}", out, json,
        data=lambda: [json_inspect.attention_data(inspection, tokenizer, name, words)],
        page=lambda: json_inspect.attention_page(inspection, tokenizer, name),
        terminal=lambda: render_inspect.attention(inspection, tokenizer),
    )  # fmt: skip


@app.command("neighbors")
def neighbors(
    words: Annotated[
        list[str], typer.Argument(metavar="WORD", help="Words, each encoded with a space before it, as in a text")
    ],
    count: Annotated[int, option("--count", "-k", min=1, help="Number of tokens to list")] = 10,
    model: Model = None,
    out: OutPage = None,
    json: Json = False,
) -> None:
    """Find the tokens whose embeddings are most similar to a word's.

    gpt inspect neighbors king queen
    """
    page.check_out(out)
    loaded = _load(model, "cpu", json)
    from gpt.insight.inspect import Embeddings

    from ..show import json_inspect, render_inspect

    embeddings, name = Embeddings(loaded.model, loaded.tokenizer), str(loaded.path)
    data = json_inspect.neighbors_data([embeddings.find(word) for word in words], count, embeddings, name)
    groups = [json_inspect.near_group(entry) for entry in data["words"]]
    page.show(
        "near", f"Neighbors: {name}", out, json,
        data=lambda: [data],
        page=lambda: {"model": name, "groups": groups},
        terminal=lambda: render_inspect.near(groups),
    )  # fmt: skip


def _load(model: str | None, device: str, quiet: bool) -> "LanguageModel":
    with progress.startup_spinner(quiet=quiet):
        from gpt import api
    return api.load(model, device=device, dtype="float32")  # float32 gives exact numbers.
