"""Prints parameter counts: the GPT-3 table, a comparison of shapes, and the presets."""

from collections.abc import Mapping, Sequence

from rich.text import Text

from gpt.config import Preset
from gpt.model.params import Breakdown
from gpt.model.params import breakdown as count

from . import render
from .views_params import Shape

BAR_WIDTH = 20  # Width of the longest bar, in columns.
NORMS = {"layernorm": "LayerNorms, γ and β", "rmsnorm": "RMSNorms, γ"}
BIASES = {
    "all": "biases of the linear layers",
    "qkv": "biases of queries, keys and values",
    "none": "biases: the linear layers have none",
}
NAMES = "Value-Up and Value-Down are usually called W_V and W_O: the two factors of a head's value map."


def breakdown(shape: Shape) -> None:
    """Prints a table of a shape's matrices with a bar for each, then the tied and the other parameters."""
    parts, config = shape.parts, shape.config
    table = render.table("Matrix", "Dimensions", ">Parameters", ">Share", "", title=shape.name, show_footer=True)
    table.columns[0].footer, table.columns[2].footer = "Total weights", f"{parts.total_weights:,}"
    table.columns[4].min_width = BAR_WIDTH
    max_parameters = max(row.parameters for row in parts.rows)
    for row in parts.rows:
        share = f"{row.parameters / parts.total_weights:.1%}"
        bar = render.bar(row.parameters / max_parameters, BAR_WIDTH)
        table.add_row(row.matrix, row.dimensions, f"{row.parameters:,}", share, bar)
    sums = render.table(">")
    fixed = " (a fixed sine table has none)" if config.positions == "sinusoidal" else ""
    tied = "tied: the unembedding is the embedding transposed"
    sums.add_row(f"−{parts.tied:,}", tied if config.tied else "not tied: the unembedding is a separate matrix")
    if config.positions != "rotary":
        sums.add_row(f"+{parts.positions:,}", f"positions: {config.block_size:,} × {config.n_embd:,}{fixed}")
    sums.add_row(f"+{parts.biases:,}", BIASES[config.biases])
    sums.add_row(f"+{parts.layer_norms:,}", NORMS[config.norm])
    sums.add_row(f"{parts.trainable:,}", "trainable", style="bold")
    render.show(table, sums, Text(f"\n{NAMES}", "dim"), *([Text(f"{shape.note}.", "dim")] if shape.note else []))


def side_by_side(shapes: Sequence[Shape]) -> None:
    """Prints a comparison: matrices down, models across, with a dash for a missing matrix."""
    table = render.table("Matrix", *(f">{shape.name}" for shape in shapes))
    for row in max((shape.parts.rows for shape in shapes), key=len):
        table.add_row(row.matrix, *(_share(row.matrix, shape.parts) for shape in shapes))
    table.add_section()
    for name, sign, key in (
        ("Total weights", "", "total_weights"), ("tied", "−", "tied"), ("positions", "+", "positions"),
        ("biases", "+", "biases"), ("norms", "+", "layer_norms"), ("trainable", "", "trainable"),
    ):  # fmt: skip
        sums = (f"{sign}{getattr(shape.parts, key):,}" + 7 * " " for shape in shapes)
        table.add_row(name, *sums, style="" if sign else "bold")
    render.show(table, Text(NAMES, "dim"))


def _share(matrix: str, parts: Breakdown) -> str:
    sizes = [row.parameters for row in parts.rows if row.matrix == matrix]
    return f"{sizes[0]:,} {sizes[0] / parts.total_weights:6.1%}" if sizes else "–" + 7 * " "


def presets(all_presets: Mapping[str, Preset]) -> None:
    """Prints every preset with its shape and size."""
    number_columns = (">layers", ">heads", ">width", ">context", ">ids", ">parameters")
    table = render.table("Preset", *number_columns, "layout", "")
    for name, preset in all_presets.items():
        config = preset.model
        heads = f"{config.n_head}" if config.kv_heads == config.n_head else f"{config.n_head} ({config.kv_heads})"
        sizes = (config.n_embd, config.block_size, config.vocab_size, count(config).trainable)
        remark = preset.note if preset.note.startswith("for") else ""
        table.add_row(name, f"{config.n_layer}", heads, *(f"{n:,}" for n in sizes), config.layout, Text(remark, "dim"))
    render.show(table, Text("In parentheses: key/value heads, if there are fewer of them.", "dim"))
