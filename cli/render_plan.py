"""Prints the cost of training and sampling: memory, plans that fit, FLOPs and days."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from gpt.model.params import count_attended

from . import render
from .views_params import Cost

NODE = 8  # devices of a machine
MANY_DEVICES = f"More than {NODE} devices take several machines: start gpt train on each with torchrun."


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


def format_bytes(n: float) -> str:
    """Formats bytes in decimal units, as datasheets do."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:,.1f} {unit}" if unit != "B" else f"{n:,.0f} B"
        n /= 1000
    return f"{n:,.1f} TB" if n < 1000 else f"{n:,.0f} TB"


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
    table = render.table(">devices", "gpt train …", ">peak", ">days", title=title)
    for plan in cost.plans:
        launch = f"--nproc {plan.devices} " if 1 < plan.devices <= NODE else ""
        words = Text(launch + plan.options) if plan.fits else Text("nothing fits; smallest:", "dim")
        days = _days(plan.days) if plan.fits else "–"
        table.add_row(f"{plan.devices:,}", words, format_bytes(plan.memory.peak), days)
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
    days = _days(data["days"])
    duration = f"{days} day{'s' * (days != '1')} on {cost.main_plan.devices:,} {settings.kind}"
    rate = f"{data['tokens_per_second']:,.0f} tokens/s"
    return f"{data['tokens']:,} tokens at {settings.mfu:.0%} MFU: {duration}, {rate}"


def _days(days: float | None) -> str:
    return "" if days is None else f"{days:,.0f}" if days >= 100 else f"{days:.3g}"
