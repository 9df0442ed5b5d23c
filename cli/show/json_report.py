"""The data of ``gpt report``, for ``--json``, and for its page and the terminal."""

import math
from collections.abc import Sequence
from dataclasses import asdict

from gpt.insight.report import Report, find_differing_settings, finite

from .json_results import Tree, pick

POINTS = 1000  # Maximum points per curve on a page.


def report_data(report: Report, max_points: int | None = None) -> Tree:
    """Returns a run's object of ``gpt report --json``. ``max_points`` limits the points per curve."""
    history = report.history
    steps, evals = report.columns(max_points)
    end_keys = ("reason", "checkpoint", "val_loss", "bits_per_byte", "step", "seconds")
    return {
        "run": str(report.path),
        "name": report.name,
        "settings": report.settings,
        "steps": steps,
        "evals": evals,
        "bits_per_nat": report.bits_per_nat,
        "yardsticks": report.yardsticks and asdict(report.yardsticks),
        "trend": report.trend,
        "verdict": report.verdict,
        "best": history.best and pick(history.best, "step", "val_loss"),
        "samples": _samples(report),
        "copying": _copying(report),
        "before_after": report.before_after and asdict(report.before_after),
        "rollbacks": [pick(rollback, "step", "failed_step", "why") for rollback in history.rollbacks],
        "resumes": [resume.step for resume in history.resumes],
        "end": history.end and pick(history.end, *end_keys),
        "unread_lines": history.unread,
    }


def _samples(report: Report) -> list[Tree]:
    samples = [pick(sample, "step", "prompt", "text") for sample in report.history.samples]
    if report.copying is not None:
        rows = zip(samples, report.copying.samples, report.copying.texts, strict=True)
        for sample, copied, text in rows:
            sample |= {"longest": copied.longest, "longest_text": text, "share": copied.share}
    return samples


def _copying(report: Report) -> Tree | None:
    """Returns the longest span copied by the samples, and the share of copied 8-grams."""
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


def report_page(reports: Sequence[Report], max_points: int = POINTS) -> Tree:
    """Returns the data of ``pages/report.js`` and `render_report`, with up to ``max_points`` points per curve."""
    runs, unit = _comparable_runs(reports, max_points)
    high, logarithmic, cut = _limit_losses(runs)
    for run, report in zip(runs, reports, strict=True):
        run["steps"]["smooth"] = smooth_losses(run["steps"]["loss"])
        values, nats = run["yardsticks"] or {}, run["bits_per_nat"] if len(runs) == 1 else None
        known = [name for name in ("xz", "unigram", "uniform") if nats and values.get(name) is not None]
        levels = {name: values[name] / nats for name in known}  # In nats per token.
        run["levels"] = {name: level for name, level in levels.items() if high is None or level <= high}
        run["frames"] = [asdict(frame) for frame in report.history.frames] if len(runs) == 1 else []
        for sample, pieces in zip(run["samples"], report.copying.pieces if report.copying else (), strict=False):
            sample["pieces"] = pieces
    texts = {report.held_out for report in reports}
    return {
        "runs": runs,
        "unit": unit,
        "loss": {"high": high, "logarithmic": logarithmic, "cut": cut},
        "warning": "different held-out texts: their losses cannot be compared" if len(texts) > 1 else None,
        "time": time_unit(reports),
        "smooths": any(_half_window(len(run["steps"]["loss"])) for run in runs),
        "differing": [k for k in find_differing_settings([report.settings for report in reports]) if k != "started"],
    }


NATS, BITS = "nats per token", "bits per byte"
OUTCOMES = {
    None: "not finished",
    "steps": "all steps done",
    "patience": "stopped improving",
    "signal": "interrupted",
    "reward": "the program failed",
}


def _choose_loss_unit(reports: Sequence[Report]) -> str:
    """Returns the unit of losses, or bits per byte for runs on text with different tokenizers."""
    units = [*dict.fromkeys(report.loss_unit for report in reports)]
    if units != [NATS]:
        return units[0] if len(units) == 1 else f"{' or '.join(units)}, not comparable"
    tokenizers = {report.record.tokenizer and report.record.tokenizer.fingerprint for report in reports}
    if len(reports) == 1 or (len(tokenizers) == 1 and None not in tokenizers):
        return NATS
    if all(report.bits_per_nat for report in reports):
        return BITS
    return f"{NATS}, not comparable: {BITS} are not known for all runs"


def _comparable_runs(reports: Sequence[Report], max_points: int) -> tuple[list[Tree], str]:
    """Returns the data of runs with losses in a common unit, and the unit. Limits curves to ``max_points`` points."""
    runs, unit = [report_data(report, max_points) for report in reports], _choose_loss_unit(reports)
    names = [report.name for report in reports]
    for run in runs:
        if names.count(run["name"]) > 1:
            run["name"] = run["run"]  # Distinguish runs of the same name by path.
        reason = (run["end"] or {}).get("reason")
        run["outcome"] = OUTCOMES.get(reason, reason)
        for columns, key in ((run["steps"], "loss"), (run["evals"], "val_loss")):
            if unit == BITS:
                columns[key] = [loss and finite(loss * run["bits_per_nat"]) for loss in columns[key]]
    return runs, unit


def _limit_losses(runs: Sequence[Tree]) -> tuple[float | None, bool, str | None]:
    """Returns the upper end of the losses' axis, whether it is logarithmic, and what it cuts off. A loss far above the
    start, or a training loss far below all held-out losses, must not flatten other curves."""
    losses = [(run["steps"]["loss"], run["evals"]["val_loss"]) for run in runs]
    known = [[[loss for loss in curve if loss is not None] for curve in curves] for curves in losses]
    starts = [max(curve[0] for curve in curves if curve) for curves in known if any(curves)]
    if not starts:
        return None, False, None
    high = 1.25 * max(starts)
    if high <= 0:  # Minus a reward.
        return None, False, None
    lows = [min(held_out or training) for training, held_out in known if training or held_out]
    reached = [max(map(max, filter(None, curves)), default=0.0) for curves in known]
    tops = zip(runs, reached, strict=True)
    above = ", ".join(f"{run['name']} reaches {loss:.3g}" for run, loss in tops if loss > high)
    return high, 0 < min(lows) < high / 1000, f"cut at {high:.3g}: {above}" if above else None


def time_unit(reports: Sequence[Report]) -> tuple[float, str]:
    """Returns the length in seconds and the name of a time unit that suits the longest run."""
    histories = [report.history for report in reports]
    longest = max(each[-1].seconds for history in histories for each in (history.steps, history.evals) if each)
    return (3600, "hours") if longest > 7200 else (60, "minutes") if longest > 300 else (1, "seconds")


def smooth_losses(losses: Sequence[float | None]) -> list[float | None]:
    """Returns the mean of a centred window around each loss, or None if the loss is None. Windows are smaller at the
    start of the curve, where the loss falls fast, and at the end."""
    half_window = _half_window(len(losses))
    means: list[float | None] = []
    for at, loss in enumerate(losses):
        window = losses[at - min(at, half_window) : at + min(at, half_window) + 1]
        values = [value for value in window if value is not None]
        means.append(None if loss is None else math.fsum(value / len(values) for value in values))
    return means


def _half_window(points: int) -> int:
    """Returns half the width of the smoothing window: 2 % of the curve, or 0 for a short curve."""
    return 0 if points < 20 else max(1, points // 50)
