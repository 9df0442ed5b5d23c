"""Prints ``gpt report``."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpt.config.events import format_seconds
from gpt.system.words import counted, percent

from . import render, terminal
from .render_chart import Point, Series, chart

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
    from .json_report import report_page

    console = terminal.stdout()
    data = report_page(run_reports, POINTS)
    runs = data["runs"]
    console.print(_results_table(runs))
    if data["warning"]:
        console.print(Text(data["warning"], "yellow"))
    for run, run_report in zip(runs, run_reports, strict=True):
        name = f"{run['name']}: " if len(runs) > 1 else ""
        if run_report.yardsticks is not None:
            console.print(Text(f"{name}xz {run_report.yardsticks}", "dim"))
        if run_report.verdict:
            console.print(Text(name + run_report.verdict))
    for title, x_name, series, height, logarithmic in _charts(data):
        console.print()
        drawn = [curve for curve in series if curve.points]  # A run can have no steps yet.
        console.print(chart(title, x_name, drawn, console, height, logarithmic), no_wrap=True)
    console.print(_settings_table(runs, data["differing"]))
    for run in runs:
        _print_sample(run, console)
        if run["before_after"]:
            _print_before_after(run["before_after"], console)


def _charts(data: dict[str, Any]) -> Iterator[Chart]:
    runs = data["runs"]
    yield _loss_chart(data)
    if len(runs) > 1:
        seconds, time = data["time"]
        points = [[(x / seconds, y) for x, y in _losses(data, run["evals"], "val_loss", "seconds")] for run in runs]
        series = [Series(run["name"], points[index], index) for index, run in enumerate(runs)]
        yield _title(data, "held-out loss"), time, series, 13, True
    titles = {
        "accuracy": "accuracy", "margin": "margin of rewards", "equal_groups": "share of groups with equal rewards",
        "answer_tokens": "tokens per answer", "lr": "learning rate", "grad_norm": "gradient norm",
        "tokens_per_second": "tokens per second",
    }  # fmt: skip
    for key, title in titles.items():
        if not all(key in run["steps"] for run in runs):
            continue
        names = [run["name"] if len(runs) > 1 else "" for run in runs]
        series = [Series(names[i], _points(run["steps"], key), 2 * i) for i, run in enumerate(runs)]
        yield title, "steps", series, 7, key == "grad_norm"


def _loss_chart(data: dict[str, Any]) -> Chart:
    """Returns the chart of smoothed and held-out losses, and of a single run's raw losses in a pale colour."""
    several, smoothed = len(data["runs"]) > 1, ", smoothed" if data["smooths"] else ""
    series = []
    for index, run in enumerate(data["runs"]):
        steps, name = run["steps"], run["name"]
        if not several and smoothed:
            series.append(Series("training", _losses(data, steps, "loss"), 0, pale=True))
        label = name if several else "training" + smoothed
        series.append(Series(label, _losses(data, steps, "smooth"), 2 * index))
        evals = _losses(data, run["evals"], "val_loss")
        series.append(Series(f"{name} held-out" if several else "held-out", evals, 2 * index + 1))
    return _title(data, "loss" + (smoothed if several else "")), "steps", series, 13, True


def _title(data: dict[str, Any], what: str) -> str:
    return ", ".join(filter(None, [what, data["unit"], data["loss"]["cut"]]))


def _losses(data: dict[str, Any], columns: dict[str, list[Any]], key: str, x: str = "step") -> list[Point]:
    """Returns a curve of losses, cut off at the upper end of the axis."""
    high = math.inf if data["loss"]["high"] is None else data["loss"]["high"]
    return [(at, min(loss, high)) for at, loss in _points(columns, key, x)]


def _points(columns: dict[str, list[Any]], key: str, x: str = "step") -> list[Point]:
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


def _settings_table(runs: Sequence[dict[str, Any]], differing: Sequence[str]) -> Table:
    """Returns the main settings of a single run, or the settings that differ between runs."""
    keys, title = [key for key in MAIN_SETTINGS if runs[0]["settings"].get(key) is not None], "settings"
    if len(runs) > 1:
        keys, title = list(differing), "settings that differ" if differing else "the settings do not differ"
    table = render.table(title=f"\n{title}")
    if len(runs) > 1 and keys:
        table.add_row("", *(Text(run["name"], "bold") for run in runs))
    for key in keys:
        values = (run["settings"].get(key) for run in runs)
        table.add_row(Text(key, "dim"), *(Text("–" if value is None else str(value)) for value in values))
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


def _print_before_after(compared: dict[str, Any], console: Console) -> None:
    """Prints the losses before and after fine-tuning, the answers, and the tokens that changed most."""

    def print_changes(title: str, unit: str, rows: Sequence[dict[str, Any]]) -> None:
        table = render.table(unit, ">before", ">after", ">change", title=f"\n{title}")
        for row in rows:
            table.add_row(Text(row["text"]), f"{row['before']:.4f}", f"{row['after']:.4f}", f"{row['change']:+.4f}")
        console.print(table)

    names = f"before: {compared['base']}; after: {compared['tuned']}"
    print_changes(names, "loss, nats per token", compared["losses"])
    for answer in compared["answers"]:
        console.print(Text(f"\n{render.excerpt(answer['prompt'], SAMPLE_LINES)}", "dim"))
        for when in ("before", "after"):
            console.print(Text(when, "bold"))
            console.print(Text(render.excerpt(answer[when], SAMPLE_LINES), "italic"))
    most = [compared["passage"][at] for at in compared["most"]]
    print_changes("most changed log-probabilities in a held-out passage", "token", most)


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
