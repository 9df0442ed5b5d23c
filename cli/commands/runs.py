"""``gpt runs``."""

from dataclasses import asdict
from pathlib import Path

from gpt.system.errors import UserError

from ..options import Json
from ..show import render, render_data


def runs(json: Json = False) -> None:
    """List the runs in runs/: text, size, loss, and whether more training helps."""
    from gpt.insight.report import summarize
    from gpt.runs.folder import RUNS, runs_in

    summaries = sorted(map(summarize, runs_in(Path(RUNS))), key=lambda run: run.started or "")
    if not summaries and not json:
        raise UserError(f"there are no runs in {RUNS}/", "train one: gpt train FILE")
    render.json_line(*map(asdict, summaries)) if json else render_data.runs(summaries)
