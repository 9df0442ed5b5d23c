"""``gpt report``."""

from typing import TYPE_CHECKING, Annotated

import typer

from gpt.errors import UserError

from . import page, progress, render
from .options import Json, Quiet
from .page import OutPage

if TYPE_CHECKING:
    from gpt.runs.report import Report


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN", help="Run folders, or files with the curves of other programs", show_default="the newest run"
        ),
    ] = None,
    out: OutPage = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the curves, settings and samples of runs. Samples are compared with the training text, to find copied spans;
    several runs are overlaid.

    gpt report
    gpt report runs/book -o report.html
    gpt report runs/a runs/b
    """
    page.check_out(out, ".html")
    found = _read(runs, quiet)
    from . import render_report, views_report

    if json:
        for each in found:
            render.json_line(views_report.report_data(each))
    if out is not None:
        title = ", ".join(each.name for each in found)
        page.write(out, page.html("report", f"report: {title}", views_report.report_page(found)), json)
    elif not json:
        render_report.reports(found)


def _read(runs: list[str] | None, quiet: bool) -> "list[Report]":
    with progress.starting(quiet):
        from gpt.runs import report as reports
    paths = [reports.find_run(word) for word in runs] if runs else [reports.find_run(None)]
    if len(set(paths)) < len(paths):
        raise UserError("the same run was given twice", "give each run once")
    found = []
    for path in paths:
        with progress.Bar("compared", "tokens", quiet) as bar:
            found.append(reports.report(path, bar.reach))
    return found
