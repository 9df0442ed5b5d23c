"""Runs as the data of ``gpt report --json`` and of its page."""

from collections.abc import Sequence
from typing import Any

from gpt.runs.report import Report, differing

POINTS = 1000  # of a curve on a page
Tree = dict[str, Any]


def report_data(report: Report, most: int | None = None) -> Tree:
    """All that is known of a run; ``most``: points of a curve, else every step."""
    history = report.history
    steps, evals = report.columns(most)
    end = None
    if history.end is not None:
        end = {key: getattr(history.end, key) for key in ("reason", "checkpoint", "val_loss", "bits_per_byte", "step")}
    return {
        "run": str(report.path),
        "name": report.name,
        "settings": report.settings,
        "steps": steps,
        "evals": evals,
        "best": None if history.best is None else {"step": history.best.step, "val_loss": history.best.val_loss},
        "samples": _samples(report),
        "copying": _copying(report),
        "rollbacks": [
            {"step": each.step, "failed_step": each.failed_step, "why": each.why} for each in history.rollbacks
        ],
        "resumes": [each.step for each in history.resumes],
        "end": end,
        "unread_lines": history.unread,
    }


def _samples(report: Report) -> list[Tree]:
    found = [{"step": sample.step, "text": sample.text} for sample in report.history.samples]
    if report.copying is not None:
        rows = zip(found, report.copying.samples, report.copying.texts, strict=True)
        for sample, copied, text in rows:
            sample |= {"longest": copied.longest, "longest_text": text, "share": copied.share}
    return found


def _copying(report: Report) -> Tree | None:
    """The longest span of all samples, and the share of all their 8-grams."""
    copying = report.copying
    if copying is None or not copying.samples:
        return None
    at = max(range(len(copying.samples)), key=lambda i: copying.samples[i].longest)
    measured = [copied for copied in copying.samples if copied.share is not None]
    spans = sum(copied.spans for copied in measured)
    return {
        "longest": copying.samples[at].longest,
        "text": copying.texts[at],
        "step": report.history.samples[at].step,
        "share": sum((copied.share or 0.0) * copied.spans for copied in measured) / spans if spans else None,
        "compared": copying.compared,
        "trained": copying.trained,
    }


def report_page(reports: Sequence[Report]) -> Tree:
    """What ``pages/report.js`` draws."""
    runs = [report_data(each, POINTS) for each in reports]
    return {"runs": runs, "differing": [k for k in differing([each.settings for each in reports]) if k != "started"]}
