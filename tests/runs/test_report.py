"""``gpt report``: what a run told, each step once; what samples copy, against a search by hand."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Gpt, one_line_of_what_and_what_next
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt import events
from gpt.errors import UserError
from gpt.runs import copying, report
from gpt.runs.record import RunRecord, TokenizerRecord


def step(number: int, loss: float = 1.0) -> events.StepEvent:
    return events.StepEvent(number, 10 * number, float(number), loss, 0.1, 2.0, 100.0)


def held_out(number: int, loss: float) -> events.EvalEvent:
    return events.EvalEvent(number, 10 * number, float(number), loss, True)


def history(*told: events.Event) -> report.History:
    found = report.History()
    for event in told:
        found.add(event)
    return found


# What counts of what was told


def test_what_is_done_again_counts_once() -> None:
    found = history(
        step(1, 3.0), step(2, 2.0), held_out(2, 2.5), step(3, 9.0), step(2, 1.0), held_out(2, 1.5), step(3, 0.5)
    )
    assert [(each.step, each.loss) for each in found.steps] == [(1, 3.0), (2, 1.0), (3, 0.5)]
    assert [(each.step, each.val_loss) for each in found.evals] == [(2, 1.5)]


def test_a_rollback_forgets_what_came_after() -> None:
    sample = events.SampleEvent(3, 30, 3.0, "gone")
    back = events.RollbackEvent(1, 10, 4.0, 3, "the loss became nan", 0.5)
    found = history(step(1), held_out(1, 2.0), step(2), held_out(2, 0.1), step(3, math.nan), sample, back)
    assert [each.step for each in found.steps] == [1]
    assert [each.step for each in found.evals] == [1]
    assert found.samples == []
    assert found.rollbacks == [back]
    assert found.best is not None
    assert found.best.val_loss == 2.0


def test_a_resumed_run_has_no_end_yet() -> None:
    end = events.EndEvent(2, 20, 2.0, "signal", None, None, None)
    found = history(step(1), step(2), end, events.ResumeEvent(2, 20, 2.0, "step-000002"))
    assert found.end is None
    assert [each.step for each in found.resumes] == [2]
    assert len(found.steps) == 2
    assert history(step(1), end).end == end


def write(run: Path, *lines: str) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "run.json").write_text('{"format": 1, "texts": ["a"]}')
    (run / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return run


def test_a_rate_without_mfu_and_a_loss_that_is_none(tmp_path: Path) -> None:
    old = '{"event": "step", "step": 1, "tokens": 8, "seconds": 0.5, "loss": null, "lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 9.0}'
    found = report.report(write(tmp_path / "r", old, events.to_json(step(2, 2.0))))
    steps, evals = found.columns()
    assert steps["loss"] == [None, 2.0]
    assert steps["mfu"] == [None, None]
    assert evals == {"step": [], "tokens": [], "seconds": [], "val_loss": []}
    assert found.copying is None
    assert found.settings["text"] == "a"


def test_thinned_curves_are_means() -> None:
    steps = [step(n, math.nan if n == 3 else float(n)) for n in range(1, 8)]
    rows = report.thinned(steps, 3)
    assert [row["step"] for row in rows] == [3, 6, 7]
    assert [row["loss"] for row in rows] == [1.5, 5.0, 7.0]
    assert [row["loss"] for row in report.thinned(steps[:2], 3)] == [1.0, 2.0]


# Copying


class Ids:
    """What `Stream` is to `copied`."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = np.array(ids, np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, start: int, length: int) -> Any:
        assert start + length <= len(self.ids)
        return self.ids[start : start + length]

    def release(self) -> None:
        pass


def by_hand(text: list[int], training: list[int]) -> tuple[int, float | None]:
    spans = {tuple(training[at : at + n]) for n in range(8, len(text) + 1) for at in range(len(training) - n + 1)}
    grams = [tuple(text[at : at + 8]) for at in range(len(text) - 7)]
    longest = max(
        (n for n in range(8, len(text) + 1) for at in range(len(text) - n + 1) if tuple(text[at : at + n]) in spans),
        default=0,
    )
    return longest, sum(gram in spans for gram in grams) / len(grams) if grams else None


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_copying_is_a_search_by_hand(data: st.DataObject) -> None:
    ids = st.integers(0, 2)
    training = data.draw(st.lists(ids, max_size=60))
    texts = data.draw(st.lists(st.lists(ids, max_size=20), min_size=1, max_size=3))
    if training and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(training) - 1))
        texts[0] += training[at : at + 12]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "AT_ONCE", data.draw(st.integers(1, 30)))
        found = copying.find_copies(texts, Ids(training))  # type: ignore[arg-type]
    for text, told in zip(texts, found, strict=True):
        assert (told.longest, told.share) == by_hand(text, training)
        span = text[told.start : told.start + told.longest]
        assert not span or any(training[at : at + len(span)] == span for at in range(len(training)))


def test_equal_hashes_do_not_pass_for_equal_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_hashes", lambda ids: np.zeros(len(ids) - 7, np.uint64))
    training = list(range(100, 140))
    found = copying.find_copies([[*range(110, 120), 1, 2], list(range(12))], Ids(training))  # type: ignore[arg-type]
    assert [(each.longest, each.share) for each in found] == [(10, 3 / 5), (0, 0.0)]


def test_only_the_beginning_of_a_huge_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "MOST", 50)
    heard: list[tuple[int, int]] = []
    training = Ids(list(range(100)))
    found = copying.find_copies([list(range(30, 45)), list(range(60, 75))], training, lambda *done: heard.append(done))  # type: ignore
    assert [each.longest for each in found] == [15, 0]
    assert heard == [(50, 50)]


# The command


def test_json_is_what_the_metrics_say(gpt: Gpt, run_folder: Path) -> None:
    values = json.loads(gpt("report", run_folder, "--json").out)
    told = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    steps = [each for each in told if each["event"] == "step"]
    for key in ("step", "tokens", "loss", "lr", "grad_norm"):
        assert values["steps"][key] == [each[key] for each in steps]
    evals = [each for each in told if each["event"] == "eval"]
    assert values["evals"]["val_loss"] == [each["val_loss"] for each in evals]
    assert values["best"]["val_loss"] == min(each["val_loss"] for each in evals)
    assert values["end"]["reason"] == "steps"
    assert values["samples"][-1]["text"] == next(each["text"] for each in reversed(told) if each["event"] == "sample")
    assert values["settings"]["n_embd"] == 32
    assert values["unread_lines"] == 0


def test_copying_against_the_training_text(gpt: Gpt, two_runs: list[Path]) -> None:
    values = json.loads(gpt("report", two_runs[1], "--json").out)
    first, last = values["samples"]
    assert (first["longest"], first["share"]) == (0, 0.0)
    assert last["share"] > 0.7  # ids at the ends may be cut otherwise
    assert last["longest"] > 40
    assert last["longest_text"] in last["text"]
    assert values["copying"]["longest"] == last["longest"]
    assert values["copying"]["compared"] == values["copying"]["trained"] > 0
    assert 0 < values["copying"]["share"] < last["share"]  # of all spans of both
    shutil.rmtree("two/tokens")
    gone = json.loads(gpt("report", "two", "--json").out)
    assert gone["copying"] is None
    assert gone["steps"] == values["steps"]


def test_a_folder_of_tokens_that_was_changed_is_not_compared(gpt: Gpt, two_runs: list[Path]) -> None:
    shutil.move("two/tokens", "elsewhere")
    record = json.loads(Path("two/run.json").read_text())
    from gpt.files import file_sha256

    record["sources"] = [{"name": "elsewhere", "sha256": file_sha256(Path("elsewhere/manifest.json"))}]
    Path("two/run.json").write_text(json.dumps(record))
    assert json.loads(gpt("report", "two", "--json").out)["copying"]["longest"] > 40
    record["sources"][0]["sha256"] = "0" * 64
    Path("two/run.json").write_text(json.dumps(record))
    assert json.loads(gpt("report", "two", "--json").out)["copying"] is None


def test_in_a_terminal(gpt: Gpt, two_runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    done = gpt("report", "one")
    assert done.code == 0, done.err
    for words in (
        "loss, nats per token",
        "held-out",
        "gradient norm",
        "tokens per second",
        "n_embd",
        "sample at step 30",
    ):
        assert words in done.out
    both = gpt("report", "one", "two").out
    assert "settings that differ" in both
    assert "0.123" in both
    assert "n_embd" not in both
    assert "the longest span has" in both
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in gpt("report", "one").out
    monkeypatch.delenv("FORCE_COLOR")
    Path("runs").mkdir()
    Path("one").rename("runs/one")
    assert json.loads(gpt("report", "--json").out)["name"] == "one"  # the newest run


def test_what_is_refused(gpt: Gpt, two_runs: list[Path]) -> None:
    def refused(message: str, *args: str) -> None:
        one_line_of_what_and_what_next(gpt("report", *args), message)

    refused("there is no run nowhere", "nowhere")
    refused("is not a run: it has no run.json", ".")
    refused("the same run was given twice", "one", "one")
    refused("does not name a format", "one", "-o", "r.png")
    refused("there is no folder", "one", "-o", "none/r.html")
    Path("two/metrics.jsonl").write_text("")
    refused("contains no steps", "two")
    Path("two/metrics.jsonl").unlink()
    refused("has no metrics: metrics.jsonl is missing", "two")
    Path("two/run.json").write_text("{")
    refused("is damaged", "two")


# Beside other programs


POINT = '{"step": 250, "seconds": 12.5, "val_loss": 2.0, "bits_per_byte": 3.0}'


def test_a_curve_of_another_program(tmp_path: Path) -> None:
    path = tmp_path / "nanogpt.jsonl"
    path.write_text(POINT + '\n{"step": 500, "seconds": 12.5, "val_loss": 1.0}\n')
    found = report.report(path)
    steps, evals = found.columns()
    assert (found.name, found.is_run, found.settings, steps["step"]) == ("nanogpt", False, {}, [])
    assert evals == {"step": [250, 500], "tokens": [None] * 2, "seconds": [12.5, 12.5], "val_loss": [2.0, 1.0]}
    assert found.bits_per_nat == 1.5  # as one line tells
    assert found.history.end is not None and found.history.end.bits_per_byte == 1.5


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "is empty"),
        ("[" * 100_000, "line 1 of .* is not JSON"),
        (POINT.replace("2.0", "NaN"), "line 1 of .* is damaged: val_loss is nan"),
        (POINT.replace("250", "1e3"), "line 1 of .* is damaged: step is 1000.0"),
        ('{"step": 1, "seconds": 1.0}', "line 1 of .* is damaged: .*val_loss"),
        (f"{POINT}\n{POINT}", "line 2 of .* is out of order"),
    ],
)
def test_a_curve_that_is_none(tmp_path: Path, lines: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.jsonl").write_text(lines)
    with pytest.raises(UserError, match=message) as error:
        report.report(tmp_path / "c.jsonl")
    assert error.value.hint
    (tmp_path / "c.jsonl").write_text(POINT)
    monkeypatch.setattr(report, "CURVE_LIMIT", len(POINT) - 1)
    with pytest.raises(UserError, match="has .* bytes"):
        report.report(tmp_path / "c.jsonl")


def test_losses_of_several_tokenizers_are_in_bits_per_byte(gpt: Gpt, two_runs: list[Path]) -> None:
    from gpt_cli.views_report import report_page

    Path("peer.jsonl").write_text(POINT)
    one, two, peer = (report.report(Path(name)) for name in ("one", "two", "peer.jsonl"))
    assert report_page([one, two])["unit"] == report_page([peer])["unit"] == "nats per token"
    page = report_page([one, peer])
    assert page["unit"] == "bits per byte"
    assert page["differing"] == []
    ours, theirs = page["runs"]
    ratio = one.bits_per_nat
    assert ratio is not None
    for columns, key in (("steps", "loss"), ("evals", "val_loss")):
        plain = one.columns()[columns == "evals"][key]
        assert ours[columns][key] == pytest.approx([ratio * loss for loss in plain if loss is not None])
    assert theirs["evals"]["val_loss"] == [3.0]
    assert "not comparable" in report_page([one, two, peer])["unit"]  # the second has not ended
    Path("more").mkdir()
    Path("more/peer.jsonl").write_text(POINT)
    named = [replace(peer, path=Path(path)) for path in ("peer.jsonl", "more/peer.jsonl")]
    assert [run["name"] for run in report_page(named)["runs"]] == ["peer.jsonl", "more/peer.jsonl"]
    Path("other.jsonl").write_text('{"step": 1, "seconds": 1, "val_loss": 1}')
    assert "not comparable" in report_page([peer, report.report(Path("other.jsonl"))])["unit"]
    changed = replace(one.record, tokenizer=TokenizerRecord("another", "another"))
    assert report_page([one, replace(one, record=changed)])["unit"] == "bits per byte"


def test_runs_and_curves_in_a_terminal(gpt: Gpt, two_runs: list[Path]) -> None:
    Path("peer.jsonl").write_text(POINT)
    done = gpt("report", "one", "peer.jsonl")
    assert done.code == 0, done.err
    for words in ("another program", "held-out loss, bits per byte", "seconds", "peer", "sample at step 30", "n_embd"):
        assert words in done.out
    alone = gpt("report", "peer.jsonl").out
    assert "loss, nats per token" in alone and "settings" not in alone
    lines = [json.loads(line) for line in gpt("report", "one", "peer.jsonl", "--json").out.splitlines()]
    assert [line["name"] for line in lines] == ["one", "peer"]
    assert lines[1]["evals"]["val_loss"] == [2.0]
    one_line_of_what_and_what_next(gpt("report", "one", "one/run.json"), "line 1 of one/run.json is")


def test_time_is_in_units_that_one_can_read() -> None:
    from gpt_cli.views_report import time_unit

    def run(seconds: float) -> report.Report:
        return report.Report(Path("r"), RunRecord(), history(replace(step(1), seconds=seconds)), None)

    found = [time_unit([run(1.0), run(seconds)])[1] for seconds in (300.0, 301.0, 7201.0)]
    assert found == ["seconds", "minutes", "hours"]


def test_a_curve_in_letters_and_in_dots() -> None:
    from gpt_cli.render_chart import Series, chart
    from rich.console import Console

    rising = Series("up", [(float(x), float(x)) for x in range(10)])
    plain = Console(width=52, color_system=None)
    lines = chart("t", "x", [rising], plain, height=9).plain.splitlines()
    places = [line.find("*") for line in lines[1:10] if "*" in line]
    assert len(places) == 8  # up to 9, of 10
    assert places == sorted(places, reverse=True)
    assert [line[:11] for line in lines[1:10] if "+" in line] == [f"{y:10}+" for y in (10, 5, 0)]
    assert lines[9].startswith("         0+*")
    assert all(len(line) <= 52 for line in lines)
    fine = Console(width=52, color_system="truecolor", force_terminal=True)
    if (fine.encoding or "").startswith("utf"):
        assert any(0x2800 < ord(mark) < 0x2900 for mark in chart("t", "x", [rising], fine).plain)
    assert "nothing was recorded" in chart("t", "x", [Series("", [(1.0, math.nan)])], plain).plain
    assert chart("t", "x", [Series("", [(1.0, 2.0)])], plain, height=5).plain.count("*") == 1


def test_curves_have_gaps_and_pale_ones_lie_below() -> None:
    from gpt_cli.render_chart import Series, chart
    from rich.console import Console

    plain = Console(width=52, color_system=None)
    gap = Series("", [(0.0, 1.0), (1.0, 1.0), (2.0, math.nan), (8.0, 1.0), (9.0, 1.0)])
    [line] = [line for line in chart("t", "x", [gap], plain).plain.splitlines() if "*" in line]
    assert " " * 25 in line.strip()
    same = [(0.0, 5000.0), (9.0, 5000.0)]
    both = chart("t", "x", [Series("", same), Series("", same, pale=True)], plain).plain
    assert "*" in both
    assert "." not in both


def test_a_smoothed_curve_is_the_mean_of_the_steps_around() -> None:
    from gpt_cli.views_report import smoothed

    losses = [float(x * x % 17) for x in range(150)]
    found = smoothed(losses)
    assert found[1] == pytest.approx(sum(losses[:3]) / 3)  # as many after it as before
    assert found[50] == pytest.approx(sum(losses[47:54]) / 7)
    assert found[149] == pytest.approx(sum(losses[146:]) / 4)
    assert smoothed(losses[:19]) == losses[:19]
    holes: list[float | None] = [None if x == 50 else 2.0 for x in range(100)]
    assert smoothed(holes) == holes
    assert smoothed([1.7e308] * 40) == pytest.approx([1.7e308] * 40)
