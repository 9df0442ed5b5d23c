"""``gpt inspect attention|neighbors|analogy|positions``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import inputs
from ..options import Device, Json, Model, Out, PromptFile, option
from ..show import page, plots, progress, render

if TYPE_CHECKING:
    from gpt.api import LanguageModel
    from gpt.insight.inspect import Embeddings

app = typer.Typer(help="Look inside a model: attention, embeddings, positions.")

Count = Annotated[int, option("--count", "-k", min=1, help="Number of tokens to list")]


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
    out: Out = None,
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
        data=lambda: json_inspect.attention_data(inspection, tokenizer, name, words),
        page=lambda: json_inspect.attention_page(inspection, tokenizer, name),
        picture=lambda: plots.attention(inspection, tokenizer, name),
        terminal=lambda: render_inspect.attention(inspection, tokenizer),
    )  # fmt: skip


@app.command("neighbors")
def neighbors(
    words: Annotated[
        list[str], typer.Argument(metavar="WORD", help="Words, each encoded with a space before it, as in a text")
    ],
    count: Count = 10,
    model: Model = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Find the tokens whose embeddings are most similar to a word's.

    gpt inspect neighbors king queen
    """
    embeddings, name = _load_embeddings(model, out, json)
    from ..show import json_inspect

    data = json_inspect.neighbors_data([embeddings.find(word) for word in words], count, embeddings, name)
    groups = [json_inspect.near_group(entry["word"].strip(), [entry], entry["neighbors"]) for entry in data["words"]]
    _show_near(data, "Neighbors", name, groups, out, json)


@app.command("analogy")
def analogy(
    words: Annotated[
        list[str],
        typer.Argument(metavar="WORD - WORD + WORD", help="Sum and difference of words, with spaces around + and -"),
    ],
    count: Count = 10,
    model: Model = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Find the tokens closest to a sum of embeddings.

    gpt inspect analogy king - man + woman
    """
    from gpt.insight.inspect import parse_analogy  # Slow, because it imports torch.

    parsed = parse_analogy(words)
    embeddings, name = _load_embeddings(model, out, json)
    from ..show import json_inspect

    terms = [(sign, embeddings.find(word)) for sign, word in parsed]
    data = json_inspect.analogy_data(terms, count, embeddings, name)
    title = " ".join(f"{'+' if sign > 0 else '−'} {word.text.strip()}" for sign, word in terms).removeprefix("+ ")
    group = json_inspect.near_group(title, data["terms"], data["nearest"])
    _show_near(data, "Analogy", name, [group], out, json)


@app.command("positions")
def positions(model: Model = None, out: Out = None, json: Json = False) -> None:
    """Show the position embeddings, and how similar two positions are by distance.

    gpt inspect positions -m runs/book -o positions.html
    """
    page.check_out(out)
    loaded = _load(model, "cpu", json)
    from gpt.insight import inspect

    from ..show import json_inspect, render_inspect

    name, position_info = str(loaded.path), inspect.positions(loaded.model)
    page.show(
        "positions", f"positions: {name}", out, json,
        data=lambda: json_inspect.positions_data(position_info, name),
        page=lambda: json_inspect.positions_page(position_info, name),
        picture=lambda: plots.positions(position_info, name),
        terminal=lambda: render_inspect.positions(position_info),
    )  # fmt: skip


def _load(model: str | None, device: str, quiet: bool) -> "LanguageModel":
    with progress.startup_spinner(quiet=quiet):
        from gpt import api
    return api.load(model, device=device, dtype="float32")  # float32 gives exact numbers.


def _load_embeddings(model: str | None, out: Path | None, json: bool) -> "tuple[Embeddings, str]":
    page.check_out(out)
    loaded = _load(model, "cpu", json)
    from gpt.insight.inspect import Embeddings

    return Embeddings(loaded.model, loaded.tokenizer), str(loaded.path)


def _show_near(
    data: page.Data, title: str, model: str, groups: Sequence[page.Data], out: Path | None, json: bool
) -> None:
    from ..show import render_inspect

    explanation = "Cosine similarity of two rows of the embedding: 1 is the same direction, 0 is unrelated."
    page.show(
        "near", f"{title}: {model}", out, json,
        data=lambda: data,
        page=lambda: {"title": title, "model": model, "notes": [explanation], "groups": groups},
        picture=lambda: plots.near(groups),
        terminal=lambda: render_inspect.near(groups),
    )  # fmt: skip
