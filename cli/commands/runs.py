"""``gpt runs``: lists and deletes runs."""

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from gpt.system.errors import UserError
from gpt.system.words import counted

from ..options import Json, option
from ..show import render
from ..show.render_data import format_size

app = typer.Typer()


@app.callback(invoke_without_command=True)
def list_runs(context: typer.Context, json: Json = False) -> None:
    """List the runs in runs/: text, size, loss, and whether more training helps. Delete those you no longer need.

    gpt runs
    gpt runs rm book
    """
    if context.invoked_subcommand is not None:
        return
    from gpt.insight.report import summarize
    from gpt.runs.folder import RUNS, runs_in

    runs = sorted(map(summarize, runs_in(Path(RUNS))), key=lambda run: run.started or "")
    if json:
        for run in runs:
            render.json_line(asdict(run))
        return
    if not runs:
        raise UserError(f"there are no runs in {RUNS}/", "train one: gpt train FILE")
    table = render.table("Run", "Text", ">Parameters", ">Bits per byte", "Verdict", "Started (UTC)", ">Size")
    for run in runs:
        bits = "" if run.bits_per_byte is None else f"{run.bits_per_byte:.3f}"
        parameters = "" if run.parameters is None else f"{run.parameters:,}"
        started = (run.started or "")[:16].replace("T", " ")
        table.add_row(run.name, run.text or "", parameters, bits, run.verdict, started, format_size(run.bytes))
    render.show(table, Text("gpt report runs/NAME prints details; gpt train --resume runs/NAME finishes a run.", "dim"))


def _names() -> list[str]:
    from gpt.runs.folder import RUNS, runs_in

    return [path.name for path in runs_in(Path(RUNS))]


@app.command("rm")
def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Runs to delete", autocompletion=_names)],
    yes: Annotated[bool, option("--yes", "-y", help="Do not ask")] = False,
) -> None:
    """Delete runs with all their checkpoints, after asking.

    gpt runs rm book book-2
    """
    from gpt.insight.report import summarize
    from gpt.runs import folder

    runs = [path if len(path.parts) > 1 else Path(folder.RUNS, path) for path in map(Path, names)]
    for run in runs:
        folder.check_run(run)
    size = format_size(sum(summarize(run).bytes for run in runs))
    question = f"Delete {', '.join(map(str, runs))}: {counted(len(runs), 'run')}, {size}?"
    with contextlib.suppress(typer.Abort):  # The answer is missing.
        yes = yes or typer.confirm(question, err=True)
    if not yes:
        raise UserError("nothing was deleted", "answer y, or use --yes")
    for run in runs:
        folder.remove_run(run)
        render.note(f"deleted {run}")
