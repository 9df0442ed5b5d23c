"""`gpt report`: events of repeated steps, copied training text, comparisons of runs, charts."""

import json
import math
import os
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import Gpt, Stream, one_line_of_what_and_what_next
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.config import events
from gpt.insight import copying, report
from gpt.runs.record import RunRecord, TokenizerRecord


def step_event(number: int, loss: float = 1.0) -> events.StepEvent:
    return events.StepEvent(number, 10 * number, float(number), loss, 0.1, 2.0, 100.0)


def eval_event(number: int, loss: float) -> events.EvalEvent:
    return events.EvalEvent(number, 10 * number, float(number), loss, True)


def history_of(*run_events: events.Event) -> report.History:
    history = report.History()
    for event in run_events:
        history.add(event)
    return history


# Events of resumed and rolled-back runs


def test_repeated_steps_count_once() -> None:
    history = history_of(
        step_event(1, 3.0),
        step_event(2, 2.0),
        eval_event(2, 2.5),
        step_event(3, 9.0),
        step_event(2, 1.0),
        eval_event(2, 1.5),
        step_event(3, 0.5),
    )
    assert [(event.step, event.loss) for event in history.steps] == [(1, 3.0), (2, 1.0), (3, 0.5)]
    assert [(event.step, event.val_loss) for event in history.evals] == [(2, 1.5)]


def test_rollback_removes_later_events() -> None:
    sample = events.SampleEvent(3, 30, 3.0, "gone")
    rollback = events.RollbackEvent(1, 10, 4.0, 3, "the loss became nan", 0.5)
    history = history_of(
        step_event(1), eval_event(1, 2.0), step_event(2), eval_event(2, 0.1), step_event(3, math.nan), sample, rollback
    )
    assert [event.step for event in history.steps] == [1]
    assert [event.step for event in history.evals] == [1]
    assert history.samples == []
    assert history.rollbacks == [rollback]
    assert history.best is not None
    assert history.best.val_loss == 2.0


def test_resume_removes_the_end_event() -> None:
    end = events.EndEvent(2, 20, 2.0, "signal", None, None, None)
    history = history_of(step_event(1), step_event(2), end, events.ResumeEvent(2, 20, 2.0, "step-000002"))
    assert history.end is None
    assert [event.step for event in history.resumes] == [2]
    assert len(history.steps) == 2
    assert history_of(step_event(1), end).end == end


def write_run(run: Path, *lines: str) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "run.json").write_text('{"format": 1, "texts": ["a"]}')
    (run / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return run


def test_missing_mfu_and_null_losses_are_allowed(tmp_path: Path) -> None:
    old_line = '{"event": "step", "step": 1, "tokens": 8, "seconds": 0.5, "loss": null, "lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 9.0}'
    run_report = report.report(write_run(tmp_path / "r", old_line, events.to_json(step_event(2, 2.0))))
    steps, evals = run_report.columns()
    assert steps["loss"] == [None, 2.0]
    assert steps["mfu"] == [None, None]
    assert evals == {"step": [], "tokens": [], "seconds": [], "val_loss": []}
    assert run_report.copying is None
    assert run_report.settings["text"] == "a"


def test_points_of_thinned_curves_are_means() -> None:
    steps = [step_event(n, math.nan if n == 3 else float(n)) for n in range(1, 8)]
    rows = report.average_rows(steps, 3)
    assert [row["step"] for row in rows] == [3, 6, 7]
    assert [row["loss"] for row in rows] == [1.5, 5.0, 7.0]
    assert [row["loss"] for row in report.average_rows(steps[:2], 3)] == [1.0, 2.0]


# Copying


def search_copies(text: list[int], training: list[int]) -> tuple[int, float | None]:
    spans = {tuple(training[at : at + n]) for n in range(8, len(text) + 1) for at in range(len(training) - n + 1)}
    grams = [tuple(text[at : at + 8]) for at in range(len(text) - 7)]
    longest = max(
        (n for n in range(8, len(text) + 1) for at in range(len(text) - n + 1) if tuple(text[at : at + n]) in spans),
        default=0,
    )
    return longest, sum(gram in spans for gram in grams) / len(grams) if grams else None


@settings(max_examples=150)
@given(st.data())
def test_find_copies_agrees_with_a_naive_search(data: st.DataObject) -> None:
    ids = st.integers(0, 2)
    training = data.draw(st.lists(ids, max_size=60))
    texts = data.draw(st.lists(st.lists(ids, max_size=20), min_size=1, max_size=3))
    if training and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(training) - 1))
        texts[0] += training[at : at + 12]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "IDS_PER_PASS", data.draw(st.integers(1, 30)))
        patch.setattr(copying, "MAX_PAIRS", data.draw(st.integers(1, 30)))
        copies = copying.find_copies(texts, Stream(training))  # type: ignore[arg-type]
    for text, copy in zip(texts, copies, strict=True):
        assert (copy.longest, copy.share) == search_copies(text, training)
        span = text[copy.start : copy.start + copy.longest]
        assert not span or any(training[at : at + len(span)] == span for at in range(len(training)))


def test_hash_collisions_are_not_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_hashes", lambda ids: np.zeros(len(ids) - 7, np.uint64))
    training = list(range(100, 140))
    copies = copying.find_copies([[*range(110, 120), 1, 2], list(range(12))], Stream(training))  # type: ignore[arg-type]
    assert [(copy.longest, copy.share) for copy in copies] == [(10, 3 / 5), (0, 0.0)]


def test_huge_training_texts_are_searched_only_partly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "MAX_IDS", 50)
    calls: list[tuple[int, int]] = []
    training = Stream(list(range(100)))
    copies = copying.find_copies([list(range(30, 45)), list(range(60, 75))], training, lambda *done: calls.append(done))  # type: ignore
    assert [copy.longest for copy in copies] == [15, 0]
    assert calls == [(50, 50)]


def test_a_repetitive_text_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "MAX_PAIRS", 2**12)
    tracemalloc.start()
    copies = copying.find_copies(6 * [[1, 2, 3] * 33], Stream([1, 2, 3] * 1000))  # type: ignore[arg-type]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert {copy.longest for copy in copies} == {99}
    assert peak < 3e6  # All pairs at once take 30 MB.


# The command


def test_json_report_contains_the_recorded_metrics(gpt: Gpt, run_folder: Path) -> None:
    values = json.loads(gpt("report", run_folder, "--json").out)
    metrics = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in metrics if event["event"] == "step"]
    for key in ("step", "tokens", "loss", "lr", "grad_norm"):
        assert values["steps"][key] == [event[key] for event in steps]
    evals = [event for event in metrics if event["event"] == "eval"]
    assert values["evals"]["val_loss"] == [event["val_loss"] for event in evals]
    assert values["best"]["val_loss"] == min(event["val_loss"] for event in evals)
    assert values["end"]["reason"] == "steps"
    assert values["samples"][-1]["text"] == next(
        event["text"] for event in reversed(metrics) if event["event"] == "sample"
    )
    assert values["settings"]["n_embd"] == 32
    assert values["unread_lines"] == 0


def test_report_finds_copied_training_text(gpt: Gpt, two_runs: list[Path]) -> None:
    values = json.loads(gpt("report", two_runs[1], "--json").out)
    first, last = values["samples"]
    assert (first["longest"], first["share"]) == (0, 0.0)
    assert last["share"] > 0.7  # Tokens at the ends can differ.
    assert last["longest"] > 40
    assert last["longest_text"] in last["text"]
    assert values["copying"]["longest"] == last["longest"]
    assert values["copying"]["compared"] == values["copying"]["trained"] > 0
    assert 0 < values["copying"]["share"] < last["share"]  # Both samples count.
    shutil.rmtree("two/tokens")
    without_tokens = json.loads(gpt("report", "two", "--json").out)
    assert without_tokens["copying"] is None
    assert without_tokens["steps"] == values["steps"]


def test_changed_token_folders_are_not_searched(gpt: Gpt, two_runs: list[Path]) -> None:
    shutil.move("two/tokens", "elsewhere")
    record = json.loads(Path("two/run.json").read_text())
    from gpt.system.files import file_sha256

    record["sources"] = [{"name": "elsewhere", "sha256": file_sha256(Path("elsewhere/manifest.json"))}]
    Path("two/run.json").write_text(json.dumps(record))
    assert json.loads(gpt("report", "two", "--json").out)["copying"]["longest"] > 40
    record["sources"][0]["sha256"] = "0" * 64
    Path("two/run.json").write_text(json.dumps(record))
    assert json.loads(gpt("report", "two", "--json").out)["copying"] is None


def test_terminal_report_shows_curves_settings_and_samples(
    gpt: Gpt, two_runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = gpt("report", "one")
    assert result.code == 0, result.err
    for words in ("loss, nats per token", "held-out", "gradient norm", "n_embd", "sample at step 30"):
        assert words in result.out
    comparison = gpt("report", "one", "two").out
    assert "settings that differ" in comparison
    assert "0.123" in comparison
    assert "n_embd" not in comparison
    assert "the longest span has" in comparison
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in gpt("report", "one").out
    monkeypatch.delenv("FORCE_COLOR")
    Path("runs").mkdir()
    Path("one").rename("runs/one")
    assert json.loads(gpt("report", "--json").out)["name"] == "one"  # The default is the newest run.


def test_invalid_runs_and_outputs_are_errors(gpt: Gpt, two_runs: list[Path]) -> None:
    def assert_error(message: str, *args: str) -> None:
        one_line_of_what_and_what_next(gpt("report", *args), message)

    assert_error("there is no run nowhere", "nowhere")
    assert_error("is not a run: it has no run.json", ".")
    assert "did you mean" not in gpt("report", "one/tokens").err
    assert_error("the same run was given twice", "one", "one")
    assert_error("is not the name of a page", "one", "-o", "r.png")
    assert_error("there is no folder", "one", "-o", "none/r.html")
    Path("two/metrics.jsonl").write_text("")
    assert_error("contains no steps", "two")
    Path("two/metrics.jsonl").unlink()
    assert_error("has no metrics: metrics.jsonl is missing", "two")
    Path("two/run.json").write_text("{")
    assert_error("is damaged", "two")


# Several runs, and charts


def test_runs_with_different_tokenizers_are_compared_in_bits_per_byte(gpt: Gpt, two_runs: list[Path]) -> None:
    from gpt_cli.show.json_report import report_page

    one, two = (report.report(Path(name)) for name in ("one", "two"))
    other = replace(one, path=Path("more/one"), record=replace(one.record, tokenizer=TokenizerRecord("x", "x")))
    assert report_page([one, two])["unit"] == report_page([other])["unit"] == "nats per token"
    page = report_page([one, other])
    assert page["unit"] == "bits per byte"
    assert [run["name"] for run in page["runs"]] == ["one", "more/one"]
    ratio = one.bits_per_nat
    assert ratio is not None
    for columns, key in (("steps", "loss"), ("evals", "val_loss")):
        losses_in_nats = one.columns()[columns == "evals"][key]
        converted = pytest.approx([ratio * loss for loss in losses_in_nats if loss is not None])
        assert page["runs"][0][columns][key] == converted
    assert "not comparable" in report_page([one, two, other])["unit"]  # The second run is unfinished.


def test_time_unit_depends_on_duration() -> None:
    from gpt_cli.show.json_report import time_unit

    def run(seconds: float) -> report.Report:
        return report.Report(Path("r"), RunRecord(), history_of(replace(step_event(1), seconds=seconds)), None)

    units = [time_unit([run(1.0), run(seconds)])[1] for seconds in (300.0, 301.0, 7201.0)]
    assert units == ["seconds", "minutes", "hours"]


def test_charts_are_drawn_in_ascii_and_braille() -> None:
    from gpt_cli.show.render_chart import Series, chart
    from rich.console import Console

    rising = Series("up", [(float(x), float(x)) for x in range(10)])
    ascii_console = Console(width=52, color_system=None)
    lines = chart("t", "x", [rising], ascii_console, height=9).plain.splitlines()
    columns = [line.find("*") for line in lines[1:10] if "*" in line]
    assert len(columns) == 8  # The curve ends at 9, the axis at 10.
    assert columns == sorted(columns, reverse=True)
    assert [line[:11] for line in lines[1:10] if "+" in line] == [f"{y:10}+" for y in (10, 5, 0)]
    assert lines[9].startswith("         0+*")
    assert lines[11].split() == ["x", "0", "9"] and len(lines[11]) == len(lines[10])
    assert all(len(line) <= 52 for line in lines)
    decades = [(1.0, 1.0), (2.0, 10.0), (3.0, 1e4)]
    for logarithmic, labels in ((True, ["10,000", "100", "1"]), (False, ["10,000", "5,000", "0"])):
        drawn = chart("t", "x", [Series("", decades)], ascii_console, 7, logarithmic).plain.splitlines()
        assert [line.split("+")[0].strip() for line in drawn if "+" in line] == labels
    unicode_console = Console(width=52, color_system="truecolor", force_terminal=True)
    if (unicode_console.encoding or "").startswith("utf"):
        assert any(0x2800 < ord(mark) < 0x2900 for mark in chart("t", "x", [rising], unicode_console).plain)
    assert "no data" in chart("t", "x", [Series("", [(1.0, math.nan)])], ascii_console).plain
    for y, labels in ((2.0, ["3", "2"]), (0.0, ["0.1", "0"]), (-3e-30, ["-2e-30", "-3e-30"])):
        drawn = chart("t", "x", [Series("", [(1.0, y)])], ascii_console, height=5).plain
        assert drawn.count("*") == 1
        assert [line.split("+")[0].strip() for line in drawn.splitlines() if "+" in line] == labels


def test_charts_show_gaps_and_draw_pale_curves_first() -> None:
    from gpt_cli.show.render_chart import Series, chart
    from rich.console import Console

    ascii_console = Console(width=52, color_system=None)
    gap = Series("", [(0.0, 1.0), (1.0, 1.0), (2.0, math.nan), (8.0, 1.0), (9.0, 1.0)])
    [line] = [line for line in chart("t", "x", [gap], ascii_console).plain.splitlines() if "*" in line]
    assert " " * 25 in line.strip()
    points = [(0.0, 5000.0), (9.0, 5000.0)]
    overlaid = chart("t", "x", [Series("", points), Series("", points, pale=True)], ascii_console).plain
    assert "*" in overlaid
    assert "." not in overlaid


def test_smoothing_is_a_moving_average() -> None:
    from gpt_cli.show.json_report import smooth_losses

    losses = [float(x * x % 17) for x in range(150)]
    smooth = smooth_losses(losses)
    assert smooth[1] == pytest.approx(sum(losses[:3]) / 3)  # At the start, the window shrinks on both sides.
    assert smooth[50] == pytest.approx(sum(losses[47:54]) / 7)
    assert smooth[149] == pytest.approx(sum(losses[146:]) / 4)
    assert smooth_losses(losses[:19]) == losses[:19]
    with_gap: list[float | None] = [None if x == 50 else 2.0 for x in range(100)]
    assert smooth_losses(with_gap) == with_gap
    assert smooth_losses([1.7e308] * 40) == pytest.approx([1.7e308] * 40)


def test_report_is_of_the_newest_run_even_without_a_checkpoint(gpt: Gpt, two_runs: list[Path]) -> None:
    for run in two_runs:
        shutil.copytree(run, Path("runs") / run)
    for path in Path("runs/two").glob("step-*"):
        shutil.rmtree(path)
    assert json.loads(gpt("report", "--json").out)["name"] == "two"


def test_runs_are_listed(gpt: Gpt, workdir: Path) -> None:
    for day, name in enumerate("abc", 1):
        run = Path("runs", name)
        run.mkdir(parents=True)
        RunRecord(started=f"2026-01-0{day}T00:00:00+00:00", texts=["book.txt"]).write(run)
    Path("runs/b/run.json").write_text("{")
    runs = [json.loads(line) for line in gpt("runs", "--json").out.splitlines()]
    verdicts = [(run["name"], run["verdict"]) for run in runs]
    assert verdicts == [("b", "run.json is damaged"), ("a", "unfinished"), ("c", "unfinished")]
    assert runs[1]["bytes"] == Path("runs/a/run.json").stat().st_size


def test_runs_are_listed_while_one_deletes_files(gpt: Gpt, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("runs/x").mkdir(parents=True)
    RunRecord().write(Path("runs/x"))
    monkeypatch.setattr(os, "walk", lambda run: [(str(run), [], ["gone", "run.json"])])
    assert json.loads(gpt("runs", "--json").out)["bytes"] == Path("runs/x/run.json").stat().st_size
