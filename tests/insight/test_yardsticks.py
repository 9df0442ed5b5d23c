"""xz and guesses as yardsticks for a model, the trend of a run, and the sentence on both."""

import json
import lzma
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from conftest import Gpt, make_text, train

from gpt.corpus.token_folder import TokenFolder
from gpt.insight import report, yardsticks
from gpt.insight.yardsticks import Yardsticks, describe, find_trend, measure


def xz_size(data: bytes) -> int:
    return len(lzma.compress(data, lzma.FORMAT_ALONE, preset=9 | lzma.PRESET_EXTREME))


def texts_of(folder: TokenFolder) -> tuple[bytes, bytes]:
    """Returns the training and held-out text of a token folder, decoded document by document."""
    return tuple(
        b"".join(folder.tokenizer.document_bytes(document[:].tolist()) for document in folder.stream(side).documents)
        for side in ("train", "val")
    )  # type: ignore[return-value]


def test_yardsticks_agree_with_lzma_and_counting(run_folder: Path) -> None:
    folder = TokenFolder(run_folder / "tokens")
    train_text, held_out_text = texts_of(folder)
    assert (train_text + held_out_text).decode() == make_text()
    measured = report.report(run_folder).yardsticks
    assert measured is not None
    assert (measured.train_bytes, measured.text_bytes, measured.is_cut) == (len(train_text), len(held_out_text), False)
    xz = 8 * (xz_size(train_text + held_out_text) - xz_size(train_text)) / len(held_out_text)
    assert measured.xz == pytest.approx(xz, abs=0.02)
    train_ids, ids = (folder.stream(side).documents[0][:].tolist() for side in ("train", "val"))
    counts, vocab_size = Counter(train_ids), folder.tokenizer.vocab_size
    nats = [-math.log((counts[id] + 1) / (len(train_ids) + vocab_size)) for id in ids]
    bits_per_nat = (len(ids) - 1) / len(held_out_text) / math.log(2)  # The first token is not predicted.
    assert measured.unigram == pytest.approx(math.fsum(nats) / len(ids) * bits_per_nat)
    assert measured.uniform == pytest.approx(math.log(vocab_size) * bits_per_nat)


def test_long_texts_are_cut(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = TokenFolder(run_folder / "tokens")
    train_text, held_out_text = texts_of(folder)
    monkeypatch.setattr(yardsticks, "MAX_TRAIN_BYTES", 3000)
    monkeypatch.setattr(yardsticks, "MAX_TEXT_BYTES", 500)
    ratio = folder.tokens / folder.bytes
    cut = measure(folder.tokenizer, folder.stream("val"), folder.stream("train"), ratio)
    assert cut is not None and cut.is_cut
    assert 2000 < cut.train_bytes <= 3000 and 300 < cut.text_bytes <= 500
    tail, head = train_text[-cut.train_bytes :], held_out_text[: cut.text_bytes]
    assert cut.xz == pytest.approx(8 * (xz_size(tail + head) - xz_size(tail)) / len(head), abs=0.05)
    assert f"for {cut.text_bytes:,} bytes after {cut.train_bytes:,} of the training text" in str(cut)


def test_xz_without_training_text(run_folder: Path) -> None:
    folder = TokenFolder(run_folder / "tokens")
    alone = measure(folder.tokenizer, folder.stream("val"), None, 0.5)
    assert alone is not None and alone.unigram is None
    held_out_text = texts_of(folder)[1]
    assert alone.xz == pytest.approx(8 * xz_size(held_out_text) / len(held_out_text), abs=0.05)
    assert "without the training text; guesses: uniform " in str(alone)


def test_errors_do_not_fail_a_run(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(data: bytes) -> int:
        raise MemoryError

    monkeypatch.setattr(yardsticks, "_count_xz", fail)
    result, _ = train(text, steps=2)
    assert result.val_loss is not None
    assert (result.yardsticks, result.trend, result.verdict) == (None, None, "")


# The trend


def curve(*losses: float, first: int = 10) -> list[tuple[float, float]]:
    return [(first * (number + 1), loss) for number, loss in enumerate(losses)]


def per_doubling(fall: float, start: float = 4.0) -> list[tuple[float, float]]:
    return [(step, start - fall * math.log2(step / 100)) for step in range(100, 2001, 100)]


@pytest.mark.parametrize(
    ("training", "held_out", "trend"),
    [
        (per_doubling(0.2), per_doubling(0.2), "improving"),
        (per_doubling(0.05), per_doubling(0.05), "improving"),  # 1.3 % of the loss
        (per_doubling(0.02), per_doubling(0.02), "saturated"),  # 0.5 %
        (per_doubling(0.0), per_doubling(0.0), "saturated"),
        (per_doubling(0.3), per_doubling(-0.1), "overfitted"),
        ([], [(0, 2.0), (40, 3.0), (80, 5.7)], "overfitted"),  # the base model's own loss does not count
        ([], [(0, 2.0), (40, 3.0), (80, 3.01)], None),
        (per_doubling(0.4), per_doubling(0.2), "improving"),
        (per_doubling(0.9), per_doubling(0.2), "saturated"),  # The learning rate decays, and the text is memorized.
        ([], per_doubling(0.2), "improving"),
        (per_doubling(0.2), [(100, 4.0), (200, 3.0)], None),
        ([(1, 3.0)], [(0, 4.0), (1, 3.0)], None),
        (curve(math.nan, 3.0, 2.9, 2.8), curve(math.nan, 3.0, 2.9, 2.8), "improving"),
        ([], [], None),
    ],
)
def test_trend_of_made_up_curves(training: Any, held_out: Any, trend: str | None) -> None:
    assert find_trend(training, held_out) == trend


# The sentence


@pytest.mark.parametrize(
    ("bits", "xz", "size", "trend", "sentence"),
    [
        (2.2, 2.5, 1000, "improving", "better than xz by 12%; still improving: more minutes help"),
        (1.5, 1.67, 1000, None, "better than xz by 10%"),
        (3.0, 2.5, 1000, "saturated", "worse than xz by 20%, better than the unigram guess by 25%; saturated: "
         "more text helps, more steps don't"),
        (4.5, 2.5, 1000, None, "worse than the unigram guess by 12%, better than the uniform guess by 10%"),
        (6.0, 2.5, 1000, None, "worse than the uniform guess by 20%"),
        (3.0, 0.1, 1000, None, "far worse than xz, better than the unigram guess by 25%"),
        (3.0, 0.1, 90, None, "not compared with xz: the held-out text has only 90 bytes"),
        (2.505, 2.5, 1000, None, "as good as xz"),
        (None, 2.5, 1000, "improving", "still improving: more minutes help"),
        (2.0, None, 1000, None, ""),
    ],
)  # fmt: skip
def test_sentence(bits: float | None, xz: float | None, size: int, trend: Any, sentence: str) -> None:
    known = None if xz is None else Yardsticks(xz, 4.0, 5.0, 900, size, False)
    assert describe(bits, known, trend) == sentence


# The commands


def test_train_prints_and_stores_yardsticks(gpt: Gpt, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_once = Mock(side_effect=measure)
    monkeypatch.setattr("gpt.training.data.measure", measure_once)
    settings = ["--steps", "12", "--n-layer", "1", "--n-head", "1", "--n-embd", "16", "--block-size", "16"]
    args = ["train", text, *settings, "--batch-tokens", "64", "--vocab-size", "300"]
    result = gpt(*args, "-o", "one")
    assert "xz     " in result.out and "bits per byte given the training text; guesses: unigram" in result.out
    assert "model  worse than " in result.out
    stored = json.loads(Path("one/run.json").read_text())["result"]
    values = json.loads(gpt("train", "--resume", "one", "--json").out)  # A finished run prints its result again.
    assert (
        values["yardsticks"] == stored["yardsticks"] == json.loads(Path("one/run.json").read_text())["yardsticks"] != {}
    )
    assert values["verdict"].startswith("worse than ")
    logged = map(json.loads, Path("one/metrics.jsonl").read_text().splitlines())
    samples = [event for event in logged if event["event"] == "sample"]
    assert [sample["step"] for sample in samples[:3]] == [3, 6, 9]
    assert all(sample["verdict"].startswith("worse than ") for sample in samples)
    assert samples[-1]["verdict"] == values["verdict"] and samples[0]["verdict"] in " ".join(result.err.split())
    measure_once.assert_called_once()
    quiet = gpt(*args, "-o", "two", "-q")
    assert "xz" not in quiet.out and "loss" in quiet.out and quiet.err == ""


def test_eval_compares_with_the_runs_training_text(
    gpt: Gpt, two_runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("other.txt").write_text(make_text(300, seed=1))
    assert "bits per byte given the training text" in gpt("eval", "other.txt", "-m", "one").out
    assert "xz" not in gpt("eval", "other.txt", "-m", "one", "-q").out
    given = json.loads(gpt("eval", "other.txt", "-m", "one", "--json").out)
    assert given["verdict"].startswith("worse than ")
    own_training_text = json.loads(gpt("eval", "one/tokens", "-m", "one", "--split", "train", "--json").out)
    assert own_training_text["yardsticks"]["train_bytes"] == 0
    stored = report.report(Path("one")).yardsticks
    with monkeypatch.context() as patch:
        patch.setattr(report, "measure", None)  # The yardsticks of the held-out text are stored.
        values = json.loads(gpt("eval", "one/tokens", "-m", "one", "--json").out)
    assert stored is not None and values["yardsticks"] == vars(stored)
    shutil.rmtree("one/tokens")
    alone = json.loads(gpt("eval", "other.txt", "-m", "one", "--json").out)
    assert (alone["yardsticks"]["train_bytes"], alone["yardsticks"]["unigram"]) == (0, None)
    assert alone["yardsticks"]["xz"] > given["yardsticks"]["xz"]


def test_report_has_yardsticks_in_nats(gpt: Gpt, two_runs: list[Path]) -> None:
    from gpt_cli.show.json_report import report_page

    one = report.report(Path("one"))
    assert one.yardsticks is not None
    assert f"xz {one.yardsticks}" in gpt("report", "one").out
    values = json.loads(gpt("report", "one", "--json").out)
    assert values["yardsticks"] == vars(one.yardsticks)
    levels = report_page([one])["runs"][0]["levels"]
    assert levels["uniform"] == pytest.approx(math.log(400))  # nats per token
    assert levels["xz"] == pytest.approx(one.yardsticks.xz * levels["uniform"] / one.yardsticks.uniform)


@pytest.mark.parametrize("stored", [None, {}, {"xz": "low"}])
def test_old_and_damaged_records_have_no_yardsticks(gpt: Gpt, two_runs: list[Path], stored: Any) -> None:
    record = json.loads(Path("one/run.json").read_text())
    del record["result"]["yardsticks"], record["result"]["trend"], record["yardsticks"]
    if stored is not None:
        record["yardsticks"] = stored
    Path("one/run.json").write_text(json.dumps(record))
    values = json.loads(gpt("report", "one", "--json").out)
    assert values["yardsticks"] is None
    assert "xz" not in gpt("report", "one").out
    assert gpt("report", "one", "-o", "r.html").code == 0
    if stored is None:
        assert json.loads(gpt("train", "--resume", "one", "--json").out)["yardsticks"] is None
