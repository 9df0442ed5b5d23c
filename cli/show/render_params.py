"""Prints ``gpt params``: parameter counts, presets, and the cost of training and sampling."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from gpt.config.events import format_seconds
from gpt.config.model import Preset
from gpt.model.params import Breakdown, count_attended
from gpt.model.params import breakdown as count
from gpt.system.words import format_bytes

from . import render
from .json_params import Cost, Shape

BAR_WIDTH = 20  # Width of the longest bar, in columns.
NORMS = {"layernorm": "LayerNorms, γ and β", "rmsnorm": "RMSNorms, γ"}
BIASES = {
    "all": "biases of the linear layers",
    "qkv": "biases of queries, keys and values",
    "none": "biases: the linear layers have none",
}
NODE = 8  # devices of a machine
MANY_DEVICES = f"More than {NODE} devices take several machines: start gpt train on each with torchrun."
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
    tied = "tied: the unembedding is the embedding transposed"
    sums.add_row(f"−{parts.tied:,}", tied if config.tied else "not tied: the unembedding is a separate matrix")
    if config.positions != "rotary":
        sums.add_row(f"+{parts.positions:,}", f"positions: {config.block_size:,} × {config.n_embd:,}")
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


def cost(cost: Cost, name: str = "") -> None:
    """Prints memory, plans, FLOPs and time, below the heading ``name``."""
    data = cost.data()
    render.show(
        *([Text(f"\n{name}", "bold")] if name else []),
        _memory_table(cost, data["memory"]), *_memory_lines(cost, data["memory"]),
        _plans_table(cost), *([Text(MANY_DEVICES, "dim")] if cost.settings.devices > NODE else []),
        _flops_table(cost, data["flops"]),
        _time_line(cost, data["time"]),
    )  # fmt: skip


def _memory_table(cost: Cost, data: dict[str, Any]) -> Table:
    plan, settings = cost.main_plan, cost.settings
    setup = plan.setup
    ranks = "one" if plan.devices == 1 else f"each of {plan.devices:,}"
    title = f"Memory on {ranks} {settings.kind}, {setup.dtype}, {plan.options}"
    copies = "gathered from the other ranks" if setup.shard else "in the dtype of matrix products"
    current_key, other_key, other_word = "activations", "activations_recomputed", "with"
    if setup.recompute:
        current_key, other_key, other_word = other_key, current_key, "without"
    chunk = f", {setup.loss_chunk:,} tokens at a time" if setup.loss_chunk else ""
    rows = [
        ("parameters", data["parameters"], "float32"),
        ("gradients", data["gradients"], "float32"),
        ("optimizer", data["optimizer"], setup.optimizer),
        ("activations", data[current_key], f"{other_word} --recompute {format_bytes(data[other_key])}"),
        ("logits", data["logits"], f"and their gradient{chunk}"),
        ("copies", data["copies"], f"weights {copies}" if data["copies"] else ""),
    ]
    if settings.kind == "cpu":
        rows.append(("snapshot", data["snapshot"], "a copy of parameters and optimizer state, for checkpoints"))
        rows.append(("process", data["process"], "Python, torch and the tokenizer"))
    cells = ((name, format_bytes(n), Text(remark, "dim")) for name, n, remark in rows)
    table = render.table("what", ">bytes", "", title=title, rows=cells)
    table.add_section()
    moments = {"loss": "when the backward pass starts", "backward": "when it ends", "update": "in the optimizer step"}
    peak_moment = moments[max(plan.memory.moments, key=plan.memory.moments.__getitem__)]
    verdict = "fits" if plan.fits else "does not fit"
    remark = f"{peak_moment}; {verdict} in {format_bytes(plan.memory_limit)}"
    table.add_row("peak", format_bytes(plan.memory.peak), remark, style="bold")
    return table


def _memory_lines(cost: Cost, data: dict[str, Any]) -> Iterator[str]:
    if cost.settings.kind != "cpu":
        yield f"Host memory for checkpoints: {format_bytes(data['snapshot'])} per rank."
    weights, cache = (format_bytes(data["sampling"][key]) for key in ("weights", "cache"))
    size, dtype = cost.config.block_size, cost.main_plan.setup.dtype
    yield f"Sampling in {dtype}: weights {weights}, and {cache} of keys and values for {size:,} tokens."


def _plans_table(cost: Cost) -> Table:
    title = f"What fits in the memory of {cost.settings.kind}, by number of devices"
    table = render.table(">devices", "gpt train …", ">peak", ">time", title=title)
    for plan in cost.plans:
        launch = f"--nproc {plan.devices} " if 1 < plan.devices <= NODE else ""
        words = Text(launch + plan.options) if plan.fits else Text("nothing fits; smallest:", "dim")
        time = _format_days(plan.days) if plan.fits else "–"
        table.add_row(f"{plan.devices:,}", words, format_bytes(plan.memory.peak), time)
    return table


def _flops_table(cost: Cost, data: dict[str, int]) -> Table:
    config, T = cost.config, cost.config.block_size
    width = "C" if config.n_head * config.head_size == config.n_embd else "H·D"
    scores = f"S·{width}" if any(config.windows) else f"L·{width}·T"
    window_note = f", S = {count_attended(config, T):,} tokens that the layers attend to" if any(config.windows) else ""
    rows = [
        ("per trained token", "trained_token", f"6 N + 12·{scores}, T = {T:,}{window_note}"),
        ("per sampled token", "sampled_token", f"2 N + 4·{scores}, after T = {T:,}"),
        (f"{data['tokens']:,} tokens", "training", "the whole training"),
        ("", "training_without_scores", "only 6 N, as in table D.1 of the GPT-3 paper"),
    ]
    cells = ((name, f"{data[key]:.3e}", remark) for name, key, remark in rows)
    return render.table(title="Floating-point operations", rows=cells)


def _time_line(cost: Cost, data: dict[str, Any]) -> str:
    settings = cost.settings
    if data["days"] is None:
        return f"The peak FLOP/s of {settings.kind} in {settings.dtype} are unknown, so training time is too."
    duration = f"{_format_days(data['days'])} on {cost.main_plan.devices:,} {settings.kind}"
    rate = f"{data['tokens_per_second']:,.0f} tokens/s"
    return f"{data['tokens']:,} tokens at {settings.mfu:.0%} MFU: {duration}, {rate}"


def _format_days(days: float | None) -> str:
    if days is None or days < 2:
        return "" if days is None else format_seconds(max(1.0, 86_400 * days))
    return f"{days:,.0f} days" if days >= 100 else f"{days:.3g} days"
