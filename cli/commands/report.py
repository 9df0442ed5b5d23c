"""``gpt report``."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpt.system.errors import Interrupted, UserError
from gpt.system.interrupt import StopSignal

from .. import inputs
from ..options import Json, OutPage, Quiet, option
from ..show import page, progress, render

if TYPE_CHECKING:
    from gpt.insight.report import Report


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Run folders", show_default="the newest run"),
    ] = None,
    before_after: Annotated[
        bool,
        option("--before-after", help="Compare a fine-tuned run with its base: losses, answers, token probabilities"),
    ] = False,
    also: Annotated[
        str | None,
        option(metavar="TEXT", help="Also compare the losses on TEXT, to see what was forgotten (--before-after)"),
    ] = None,
    watch: Annotated[
        bool, option("--watch", help="Show a run in a browser while it trains, here or elsewhere, or as it was")
    ] = False,
    out: OutPage = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the curves, settings and samples of runs. Samples are compared with the training text, to find copied spans;
    several runs are overlaid.

    gpt report
    gpt report runs/book -o report.html
    gpt report runs/a runs/b
    gpt report runs/tuned --before-after --also wikitext-2
    """
    page.check_out(out)
    if watch:
        return _watch(runs, {"--before-after": before_after, "--also": also, "--out": out, "--json": json})
    run_reports = _read_reports(runs, quiet)
    if before_after or also is not None:
        run_reports = [_compare(run_report, also, quiet) for run_report in run_reports]
    from ..show import json_report, render_report

    page.show(
        "report", f"report: {', '.join(run_report.name for run_report in run_reports)}", out, json,
        data=lambda: map(json_report.report_data, run_reports),
        page=lambda: json_report.report_page(run_reports),
        terminal=lambda: render_report.reports(run_reports),
    )  # fmt: skip


def _watch(runs: list[str] | None, others: dict[str, object]) -> None:
    """Serves the page of a run until a signal arrives. Raises `UserError` for several runs or other options, and
    `Interrupted` at the end."""
    if given := next((name for name, value in others.items() if value), None):
        raise UserError(f"{given} cannot be combined with --watch", "leave one of them out")
    if runs and len(runs) > 1:
        raise UserError(f"--watch shows one run, and {len(runs)} are given", "use a command for each of them")
    from gpt.runs.folder import RECORD, check_run, newest_run

    from ..show import live

    run = Path(runs[0]) if runs else newest_run(file=RECORD)
    check_run(run)
    with StopSignal() as stop, live.serving(run, render.note):
        while stop.signum is None:
            time.sleep(live.POLL_SECONDS)
    raise Interrupted(stop.signum, "the page has ended; a run that is training continues")


def _read_reports(runs: list[str] | None, quiet: bool) -> "list[Report]":
    with progress.startup_spinner(quiet):
        from gpt.insight import report as reports
        from gpt.runs.folder import METRICS, newest_run
    paths = [Path(word) for word in runs] if runs else [newest_run(file=METRICS)]
    if len(set(paths)) < len(paths):
        raise UserError("the same run was given twice", "give each run once")
    run_reports = []
    for path in paths:
        with progress.Bar("compared", "tokens", quiet) as bar:
            run_reports.append(reports.report(path, bar.reach))
    return run_reports


def _compare(run_report: "Report", also: str | None, quiet: bool) -> "Report":
    inputs.announce_stdin([also] if also else [])
    with progress.startup_spinner(quiet):
        from gpt import api
    with progress.TrainDisplay(quiet) as display:
        compared = api.compare_with_base(run_report.path, also, listen=display, note=render.note)
    return replace(run_report, before_after=compared)
