"""``gpt runs``: lists and deletes runs."""

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gpt.system.errors import UserError
from gpt.system.words import counted, format_bytes

from ..options import Json, option
from ..show import render, render_data

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
    if not runs and not json:
        raise UserError(f"there are no runs in {RUNS}/", "train one: gpt train FILE")
    render.json_line(*map(asdict, runs)) if json else render_data.runs(runs)


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

    runs = [path if len(path.parts) > 1 else Path(folder.RUNS, path) for path in map(Path, dict.fromkeys(names))]
    for run in runs:
        folder.check_run(run)
    size = format_bytes(sum(summarize(run).bytes for run in runs))
    question = f"Delete {', '.join(map(str, runs))}: {counted(len(runs), 'run')}, {size}?"
    with contextlib.suppress(typer.Abort):  # The answer is missing.
        yes = yes or typer.confirm(question, err=True)
    if not yes:
        raise UserError("nothing was deleted", "answer y, or use --yes")
    for run in runs:
        folder.remove_run(run)
        render.note(f"deleted {run}")
