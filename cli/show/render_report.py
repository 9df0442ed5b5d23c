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

from . import render, terminal
from .render_chart import Series, chart

if TYPE_CHECKING:
    from gpt.insight.report import Report

Chart = tuple[str, str, list[Series], int, bool]  # Title, name of x, curves, height, whether y is logarithmic.
POINTS = 300  # Maximum points per curve.
SAMPLE_LINES = 8
MAIN_SETTINGS = (  # Settings to print for a single run.
    "text", "init", "tokenizer", "train_tokens", "preset", "norm", "mlp", "positions", "n_layer", "n_head", "n_kv_head",
    "n_embd", "window", "block_size", "vocab_size", "dropout", "batch_tokens", "optimizer", "lr", "seed", "device",
    "dtype",
)  # fmt: skip


def reports(run_reports: "Sequence[Report]") -> None:
    """Prints runs' results, curves, settings, samples and copied spans."""
    from .json_report import comparable_runs, warn_of_texts

    console = terminal.stdout()
    runs, unit = comparable_runs(run_reports, POINTS)
    names = [f"{run['name']}: " if len(runs) > 1 else "" for run in runs]
    console.print(_results_table(runs))
    if warning := warn_of_texts(run_reports):
        console.print(Text(warning, "yellow"))
    for name, run_report in zip(names, run_reports, strict=True):
        if run_report.yardsticks is not None:
            console.print(Text(f"{name}xz {run_report.yardsticks}", "dim"))
        if run_report.verdict:
            console.print(Text(name + run_report.verdict))
    for title, x_name, series, height, logarithmic in _charts(runs, run_reports, unit):
        console.print()
        drawn = [curve for curve in series if curve.points]  # Another program's curve can have no steps.
        console.print(chart(title, x_name, drawn, console, height, logarithmic), no_wrap=True)
    if own_reports := [report for report in run_reports if report.is_run]:
        console.print(_settings_table(own_reports))
    for report, run in zip(run_reports, runs, strict=True):
        if report.is_run:
            _print_sample(run, console)


def _charts(runs: Sequence[dict[str, Any]], run_reports: "Sequence[Report]", unit: str) -> list[Chart]:
    from .json_report import describe_smoothing, limit_losses, time_unit

    charts = [_loss_chart(runs, unit, *describe_smoothing(run_reports, POINTS))]
    if len(runs) > 1:
        seconds, time = time_unit(run_reports)
        points = [[(x / seconds, y) for x, y in _points(run["evals"], "val_loss", "seconds")] for run in runs]
        series = [Series(run["name"], points[index], index) for index, run in enumerate(runs)]
        charts.append((f"held-out loss, {unit}", time, series, 13, True))
    high, logarithmic, cut = limit_losses(runs)
    for at, (title, x_name, series, height, _) in enumerate(charts):
        if high is not None:
            series = [replace(curve, points=[(x, min(y, high)) for x, y in curve.points]) for curve in series]
        charts[at] = (f"{title}, {cut}" if cut else title, x_name, series, height, logarithmic)
    titles = {
        "accuracy": "accuracy", "margin": "margin of rewards", "lr": "learning rate", "grad_norm": "gradient norm",
        "tokens_per_second": "tokens per second",
    }  # fmt: skip
    for key, title in titles.items():
        if not all(key in run["steps"] for run in runs):
            continue
        names = [run["name"] if len(runs) > 1 else "" for run in runs]
        series = [Series(names[i], _points(run["steps"], key), 2 * i) for i, run in enumerate(runs)]
        charts.append((title, "steps", series, 7, key == "grad_norm"))
    return charts


def _loss_chart(runs: Sequence[dict[str, Any]], unit: str, raw: str, smoothing: str | None) -> Chart:
    """Returns the chart of smoothed and held-out losses, and of a single run's raw losses in a pale colour."""
    from .json_report import smooth_losses

    series, several = [], len(runs) > 1
    for index, run in enumerate(runs):
        steps, name = run["steps"], run["name"]
        if not several and smoothing:
            series.append(Series(f"training, {raw}", _points(steps, "loss"), 0, pale=True))
        smoothed = _points({**steps, "loss": smooth_losses(steps["loss"])}, "loss")
        series.append(Series(name if several else f"training, {smoothing or raw}", smoothed, 2 * index))
        evals = _points(run["evals"], "val_loss")
        series.append(Series(f"{name} held-out" if several else "held-out", evals, 2 * index + 1))
    return f"loss, {unit}" + (f", {smoothing}" if several and smoothing else ""), "steps", series, 13, True


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
        cells = [
            (last["step"], "{:,.0f}".format),
            (last["tokens"], "{:,.0f}".format),
            (end.get("seconds", last["seconds"]), format_seconds),
            (loss, ("{:.4f}" if (loss or 0) < 1e6 else "{:.4g}").format),
            (best and best["step"], "{:,}".format),
            (end.get("bits_per_byte"), "{:.4f}".format),
            (last["tokens_per_second"], "{:,.0f}".format),
        ]
        texts = ("–" if value is None else form(value) for value, form in cells)
        table.add_row(run["name"], *texts, run["outcome"])
    return table


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
        console.print(render.sample_text(last["prompt"], last["text"], SAMPLE_LINES))
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
