"""Prints ``gpt report``."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpt.config.events import format_seconds
from gpt.system.words import counted, percent

from . import render
from .render_chart import Series, chart

if TYPE_CHECKING:
    from gpt.insight.report import Report

POINTS = 300  # Maximum points per curve.
SAMPLE_LINES = 8
MAIN_SETTINGS = (  # Settings to print for a single run.
    "text", "init", "tokenizer", "train_tokens", "preset", "norm", "mlp", "positions", "n_layer", "n_head", "n_kv_head",
    "n_embd", "window", "block_size", "vocab_size", "dropout", "batch_tokens", "optimizer", "lr", "seed", "device",
    "dtype",
)  # fmt: skip


def reports(run_reports: "Sequence[Report]") -> None:
    """Prints runs' results, curves, settings, samples and copied spans."""
    from .views_report import comparable_runs, describe_smoothing, time_unit, warn_of_texts

    console = render.stdout()
    runs, unit = comparable_runs(run_reports, POINTS)
    console.print(_results_table(runs))
    if warning := warn_of_texts(run_reports):
        console.print(Text(warning, "yellow"))
    for run_report in run_reports:
        name = f"{run_report.name}: " if len(runs) > 1 else ""
        if run_report.yardsticks is not None:
            console.print(Text(f"{name}xz {run_report.yardsticks}", "dim"))
        if run_report.verdict:
            console.print(Text(name + run_report.verdict))
    _print_losses(runs, unit, *describe_smoothing(run_reports, POINTS), console)
    if len(runs) > 1:
        _print_held_out(runs, unit, *time_unit(run_reports), console)
    names = [run["name"] if len(runs) > 1 else "" for run in runs]
    charts = {"learning rate": "lr", "gradient norm": "grad_norm", "tokens per second": "tokens_per_second"}
    for title, key in charts.items():
        series = [Series(names[i], _points(run["steps"], key), 2 * i) for i, run in enumerate(runs)]
        _print_chart(title, "steps", series, console, 7, key == "grad_norm")
    if own_reports := [report for report in run_reports if report.is_run]:
        console.print(_settings_table(own_reports))
    for report, run in zip(run_reports, runs, strict=True):
        if report.is_run:
            _print_sample(run, console)


def _print_chart(
    title: str, x_name: str, series: Sequence[Series], console: Console, height: int, logarithmic: bool
) -> None:
    """Prints a chart of the series that have points. A curve of another program can have no steps."""
    console.print(Text("\n"), end="")
    drawn = [curve for curve in series if curve.points]
    console.print(chart(title, x_name, drawn, console, height, logarithmic), no_wrap=True)


def _print_held_out(runs: Sequence[dict[str, Any]], unit: str, seconds: float, time: str, console: Console) -> None:
    series = [
        Series(run["name"], [(x / seconds, y) for x, y in _points(run["evals"], "val_loss", "seconds")], index)
        for index, run in enumerate(runs)
    ]
    _print_loss_chart(f"held-out loss, {unit}", time, series, runs, console)


def _print_losses(runs: Sequence[dict[str, Any]], unit: str, raw: str, smoothing: str | None, console: Console) -> None:
    """Prints smoothed and held-out losses, and a single run's raw losses in a pale colour."""
    from .views_report import smooth_losses

    series = []
    for index, run in enumerate(runs):
        steps = run["steps"]
        name = run["name"] if len(runs) > 1 else f"training, {smoothing or raw}"
        if len(runs) == 1 and smoothing:
            series.append(Series(f"training, {raw}", _points(steps, "loss"), 0, pale=True))
        series.append(Series(name, _points({**steps, "loss": smooth_losses(steps["loss"])}, "loss"), 2 * index))
        name = f"{run['name']} held-out" if len(runs) > 1 else "held-out"
        series.append(Series(name, _points(run["evals"], "val_loss"), 2 * index + 1))
    smoothing_note = f", {smoothing}" if len(runs) > 1 and smoothing else ""
    _print_loss_chart(f"loss, {unit}{smoothing_note}", "steps", series, runs, console)


def _print_loss_chart(
    title: str, x_name: str, series: Sequence[Series], runs: Sequence[dict[str, Any]], console: Console
) -> None:
    from .views_report import limit_losses

    high, logarithmic, cut = limit_losses(runs)
    if high is not None:
        series = [replace(curve, points=[(x, min(y, high)) for x, y in curve.points]) for curve in series]
    _print_chart(f"{title}, {cut}" if cut else title, x_name, series, console, 13, logarithmic)


def _points(columns: dict[str, list[Any]], key: str, x: str = "step") -> list[tuple[float, float]]:
    pairs = zip(columns[x], columns[key], strict=True)
    return [(at, math.nan if value is None else value) for at, value in pairs]


def _results_table(runs: Sequence[dict[str, Any]]) -> Table:
    numbers = (">steps", ">tokens", ">time", ">held-out loss", ">best at step", ">bits per byte", ">tokens/s")
    table = render.table("run", *numbers, "end")
    for run in runs:
        steps, end, best = run["steps"], run["end"] or {}, run["best"]
        if not steps["step"]:
            steps = {**steps, **run["evals"]}
        last = {key: steps[key][-1] if steps[key] else None for key in steps}
        loss = end.get("val_loss") or (best or {}).get("val_loss")
        table.add_row(
            run["name"],
            _format_number(last["step"]),
            _format_number(last["tokens"]),
            "–" if last["seconds"] is None else format_seconds(last["seconds"]),
            "–" if loss is None else f"{loss:.4f}" if loss < 1e6 else f"{loss:.4g}",
            "–" if best is None else f"{best['step']:,}",
            "–" if end.get("bits_per_byte") is None else f"{end['bits_per_byte']:.4f}",
            _format_number(last["tokens_per_second"]),
            run["outcome"],
        )
    return table


def _format_number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _settings_table(run_reports: "Sequence[Report]") -> Table:
    """Returns the main settings of a single run, or the settings that differ between runs."""
    from gpt.insight.report import find_differing_settings

    settings = [report.settings for report in run_reports]
    keys = [key for key in MAIN_SETTINGS if settings[0].get(key) is not None]
    title = "settings"
    if len(run_reports) > 1:
        keys = [key for key in find_differing_settings(settings) if key != "started"]
        title = "settings that differ" if keys else "the settings do not differ"
    table = render.table(title=f"\n{title}")
    if len(run_reports) > 1 and keys:
        table.add_row("", *(Text(report.name, "bold") for report in run_reports))
    for key in keys:
        table.add_row(Text(key, "dim"), *(Text("–" if run.get(key) is None else str(run[key])) for run in settings))
    return table


def _print_sample(run: dict[str, Any], console: Console) -> None:
    if run["samples"]:
        last = run["samples"][-1]
        console.print(Text(f"\n{run['name']}, sample at step {last['step']:,}", "bold"))
        console.print(Text(render.excerpt(last["text"], SAMPLE_LINES), "italic"))
    console.print(Text(copying_line(run), "dim"))
    for rollback in run["rollbacks"]:
        line = f"rolled back to step {rollback['step']:,} from {rollback['failed_step']:,}: {rollback['why']}"
        console.print(Text(line, "yellow"))
    if run["unread_lines"]:
        console.print(Text(f"{counted(run['unread_lines'], 'line')} of its metrics could not be read", "yellow"))


def copying_line(run: dict[str, Any]) -> str:
    """Returns a sentence on how much the samples copy the training text."""
    copying = run["copying"]
    if not run["samples"]:
        return "no samples were kept"
    if copying is None:
        return "copying could not be measured: the training tokens are missing"
    compared_note = "" if copying["compared"] == copying["trained"] else f" (its first {copying['compared']:,} tokens)"
    share = ""
    if copying["share"] is not None:
        share = f"{percent(copying['share'])} of the samples' 8-grams are in the training text{compared_note}; "
    if not copying["longest"]:
        return f"{share}no span of 8 or more tokens is"
    text = " ".join(copying["text"].split())
    excerpt = text if len(text) <= 90 else text[:89] + "…"
    return f'{share}the longest span has {copying["longest"]} tokens: "{excerpt}"'
