"""Prints the cost of training and sampling: memory, plans that fit, FLOPs and days."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from gpt.config.model import PRESETS, GPTConfig
from gpt.config.plan import PlanConfig
from gpt.model.memory import count_saved_bytes
from gpt.model.params import breakdown, cache_bytes, count_attended, flops_per_token, flops_sampled, nearest_preset
from gpt.model.plan import TrainingPlan, plans, trained_tokens

from . import render

NODE = 8  # devices of a machine
GPT3_FLOPS = 6  # FLOPs per parameter and token in the GPT-3 paper, which ignores attention scores.


@dataclass(frozen=True)
class Cost:
    """A model's config, the settings of ``gpt params``, and the resulting plans."""

    config: GPTConfig
    settings: PlanConfig
    plans: Sequence[TrainingPlan]

    @classmethod
    def from_config(cls, config: GPTConfig, settings: PlanConfig) -> "Cost":
        """Plans the training of ``config``. Raises `UserError` if heads or batches cannot be split evenly."""
        return cls(config, settings, plans(config, settings, PRESETS[nearest_preset(config)].batch_tokens))

    @property
    def main_plan(self) -> TrainingPlan:
        """The plan for all devices."""
        return self.plans[-1]

    def data(self) -> dict[str, Any]:
        """Returns the keys that describe the cost in ``gpt params --json``."""
        return {
            "plan": self._plan(self.main_plan),
            "memory": self._memory(),
            "plans": list(map(self._plan, self.plans)),
            "flops": self._flops(),
            "time": self._time(),
        }

    def _plan(self, plan: TrainingPlan) -> dict[str, Any]:
        names = ("micro_batch", "recompute", "loss_chunk", "dtype", "optimizer")
        return {
            "kind": self.settings.kind,
            "devices": plan.devices,
            "shard": "full" if plan.setup.shard else "none",
            **{name: getattr(plan.setup, name) for name in names},
            "peak": plan.memory.peak,
            "room": plan.memory_limit,
            "fits": plan.fits,
            "days": plan.days,
        }

    def _memory(self) -> dict[str, Any]:
        """Returns bytes per rank."""
        config, memory, setup = self.config, self.main_plan.memory, self.main_plan.setup
        full, recomputed = (count_saved_bytes(config, replace(setup, recompute=each)) for each in (False, True))
        sampling = {
            "weights": breakdown(config).trainable * setup.width,
            "cache": cache_bytes(config, config.block_size, setup.width),
        }
        return {
            **{name: getattr(memory, name) for name in ("parameters", "gradients", "optimizer")},
            "activations": full,
            "activations_recomputed": recomputed,
            "logits": memory.logits,
            "copies": memory.copies,
            "moments": dict(memory.moments),
            "peak": memory.peak,
            "snapshot": memory.snapshot,
            "sampling": sampling,
        }

    def _flops(self) -> dict[str, int]:
        config, tokens = self.config, trained_tokens(self.config, self.settings)
        per_trained_token = flops_per_token(config, config.block_size)
        return {
            "trained_token": per_trained_token,
            "sampled_token": flops_sampled(config, config.block_size),
            "tokens": tokens,
            "training": per_trained_token * tokens,
            "training_without_scores": GPT3_FLOPS * breakdown(config).trainable * tokens,
        }

    def _time(self) -> dict[str, Any]:
        days, tokens = self.main_plan.days, trained_tokens(self.config, self.settings)
        throughput = None if days is None else tokens / (86_400 * days)
        return {"tokens": tokens, "mfu": self.settings.mfu, "days": days, "tokens_per_second": throughput}


def cost(cost: Cost, name: str = "") -> None:
    """Prints memory, plans, FLOPs and time, below the heading ``name``."""
    if name:
        render.stdout().print(Text(f"\n{name}", "bold"))
    data = cost.data()
    _memory(cost, data["memory"])
    _fitting_plans(cost)
    _flops(cost, data["flops"])
    _time(cost, data["time"])


def format_bytes(n: float) -> str:
    """Formats bytes in decimal units, as datasheets do."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:,.1f} {unit}" if unit != "B" else f"{n:,.0f} B"
        n /= 1000
    return f"{n:,.1f} TB" if n < 1000 else f"{n:,.0f} TB"


def _memory(cost: Cost, data: dict[str, Any]) -> None:
    plan, console = cost.main_plan, render.stdout()
    setup, settings = plan.setup, cost.settings
    ranks = "one" if plan.devices == 1 else f"each of {plan.devices:,}"
    title = f"Memory on {ranks} {settings.kind}, {setup.dtype}, {plan.options}"
    table = render.table("what", ">bytes", "", title=title)
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
    for name, n, remark in rows:
        table.add_row(name, format_bytes(n), Text(remark, "dim"))
    table.add_section()
    moments = {"loss": "when the backward pass starts", "backward": "when it ends", "update": "in the optimizer step"}
    peak_moment = moments[max(plan.memory.moments, key=plan.memory.moments.__getitem__)]
    verdict = "fits" if plan.fits else "does not fit"
    remark = f"{peak_moment}; {verdict} in {format_bytes(plan.memory_limit)}"
    table.add_row("peak", format_bytes(plan.memory.peak), remark, style="bold")
    console.print(table)
    sampling = data["sampling"]
    if settings.kind != "cpu":
        console.print(f"Host memory for checkpoints: {format_bytes(data['snapshot'])} per rank.")
    console.print(
        f"Sampling in {setup.dtype}: weights {format_bytes(sampling['weights'])}, and "
        f"{format_bytes(sampling['cache'])} of keys and values for {cost.config.block_size:,} tokens."
    )


def _fitting_plans(cost: Cost) -> None:
    console = render.stdout()
    title = f"What fits in the memory of {cost.settings.kind}, by number of devices"
    table = render.table(">devices", "gpt train …", ">peak", ">days", title=title)
    for plan in cost.plans:
        launch = f"--nproc {plan.devices} " if 1 < plan.devices <= NODE else ""
        words = launch + plan.options if plan.fits else "nothing fits; smallest:"
        days = _days(plan.days) if plan.fits else "–"
        words_cell = Text(words, "" if plan.fits else "dim")
        table.add_row(f"{plan.devices:,}", words_cell, format_bytes(plan.memory.peak), days)
    console.print(table)
    if cost.settings.devices > NODE:
        line = f"More than {NODE} devices take several machines: start gpt train on each with torchrun."
        console.print(Text(line, "dim"))


def _flops(cost: Cost, data: dict[str, int]) -> None:
    table = render.table(title="Floating-point operations")
    config, T = cost.config, cost.config.block_size
    width = "C" if config.n_head * config.head_size == config.n_embd else "H·D"
    scores = f"S·{width}" if any(config.windows) else f"L·{width}·T"
    window_note = f", S = {count_attended(config, T):,} tokens that the layers attend to" if any(config.windows) else ""
    table.add_row("per trained token", f"{data['trained_token']:.3e}", f"6 N + 12·{scores}, T = {T:,}{window_note}")
    table.add_row("per sampled token", f"{data['sampled_token']:.3e}", f"2 N + 4·{scores}, after T = {T:,}")
    table.add_row(f"{data['tokens']:,} tokens", f"{data['training']:.3e}", "the whole training")
    without_scores = f"{data['training_without_scores']:.3e}"
    table.add_row("", without_scores, "only 6 N, as in table D.1 of the GPT-3 paper")
    render.stdout().print(table)


def _time(cost: Cost, data: dict[str, Any]) -> None:
    settings, console = cost.settings, render.stdout()
    if data["days"] is None:
        console.print(f"The peak FLOP/s of {settings.kind} in {settings.dtype} are unknown, so training time is too.")
        return
    days = _days(data["days"])
    console.print(
        f"{data['tokens']:,} tokens at {settings.mfu:.0%} MFU: {days} day{'s' * (days != '1')} on "
        f"{cost.main_plan.devices:,} {settings.kind}, {data['tokens_per_second']:,.0f} tokens/s"
    )


def _days(days: float | None) -> str:
    return "" if days is None else f"{days:,.0f}" if days >= 100 else f"{days:.3g}"
