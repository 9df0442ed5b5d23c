"""Frames of a run: what `gpt inspect` shows of its checkpoints, without influence on the run."""

import math
from base64 import b64decode
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import FAST, assert_same, curve
from gpt_cli.show import json_inspect
from models import tiny_model

import gpt as library
from gpt.config import events
from gpt.insight import inspect
from gpt.insight.report import read_history
from gpt.system.errors import NotANumber
from gpt.training import film
from gpt.training.example_rows import ExampleRow, ExampleRows, RowBatches

SENTENCE = "the cat sat on the mat while the cat sat on the mat, and the cat sat"


@pytest.mark.parametrize(
    "settings", [{}, {"n_layer": 6, "n_head": 8, "dtype": "bfloat16"}, {"block_size": 8, "val_fraction": 0.0}]
)
def test_frames_equal_inspect(text: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(film, "MAX_SHARE", math.inf)

    def listen(event: Any) -> None:
        if isinstance(event, events.StepEvent) and event.step == 1:
            Path("run/sentence.txt").write_text(SENTENCE)

    library.train(text, out="run", listen=listen, **{**FAST, "steps": 4, "eval_every": 2, "keep": 9, **settings})
    first, *frames = read_history(Path("run")).frames
    assert "".join(first.pieces).replace("\\n", "\n").replace("\\t", "\t") in text.read_text()
    assert [frame.step for frame in frames] == [2, 4]
    for frame in frames:
        model = library.load(f"run:step-{frame.step}", dtype="float32")
        ids = model.tokenizer.prompt(SENTENCE)[: min(film.SENTENCE_TOKENS, model.model.config.block_size)]
        with torch.inference_mode():
            probabilities = model.model(torch.tensor([ids]))[0].softmax(-1)
        expected = [float(probabilities[at, id]) for at, id in enumerate(ids[1:])]
        assert frame.probabilities == pytest.approx(expected, abs=1e-5)
        data = json_inspect.attention_data(
            inspect.inspect_prompt(model.model, ids, model.tokenizer), model.tokenizer, "", ""
        )
        assert frame.pieces == data["pieces"]
        weights = np.frombuffer(b64decode(frame.attention), np.uint8).reshape(len(frame.heads), -1) / 255
        for (layer, head), pattern, kind in zip(frame.heads, weights, frame.kinds, strict=True):
            expected_pattern = np.array(data["patterns"][layer][head])[np.tri(len(ids), dtype=np.bool_)]
            assert pattern == pytest.approx(expected_pattern, abs=0.51 / 255)
            scores = next(each for each in data["scores"] if (each["layer"], each["head"]) == (layer, head))
            assert kind == (scores["mostly"] or "")
        for row, texts, shares in zip(frame.layers, frame.lens, frame.lens_probabilities, strict=True):
            assert texts == [best[0]["text"] for best in data["lens"][row]]
            assert shares == pytest.approx([best[0]["probability"] for best in data["lens"][row]], abs=6e-4)
        assert len(events.to_json(frame)) < 12_000


def test_frames_do_not_change_a_run_and_are_few(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**FAST, "steps": 12, "eval_every": 1, "save_every": 12, "dropout": 0.2}
    for name, share in {"none": 0.0, "all": math.inf}.items():
        monkeypatch.setattr(film, "MAX_SHARE", share or 1e-9)
        library.train(text, out=name, **settings)
    monkeypatch.setattr(film, "MAX_FRAMES", 3)
    library.train(text, out="few", **settings)
    steps = {name: [frame.step for frame in read_history(Path(name)).frames] for name in ("none", "all", "few")}
    assert steps == {"none": [0, 1, 12], "all": list(range(13)), "few": [0, 4, 8, 12]}
    for name in ("all", "few"):
        assert_same(Path(name), Path("none"))
        assert curve(Path(name)) == curve(Path("none"))


def test_ranks_sample_together_although_only_one_inspects(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, the other ranks would wait for the sample of a rank that fails to inspect."""
    sample = Mock(side_effect=film.sample_lines)
    monkeypatch.setattr(film, "sample_lines", sample)
    monkeypatch.setattr(film.inspect, "inspect_prompt", Mock(side_effect=NotANumber("logits")))
    run = library.train(text, **{**FAST, "steps": 1}).run
    assert not read_history(run).frames
    assert sample.call_count == 2


def test_passage_of_a_batch_has_no_padding() -> None:
    """The chosen answer is shorter than the rejected one."""
    rows = ExampleRows(ExampleRow(np.arange(3, n), np.arange(3, n) > 5, 0) for n in (9, 15))
    rows.sides, rows.reference = 2, np.zeros((1, 2), np.float32)
    data = SimpleNamespace(rows=1, batches=lambda recipe: RowBatches(rows, 1, 0))
    recipe = SimpleNamespace(model=tiny_model().config)
    assert film.Film(SimpleNamespace(data=data), recipe, []).passage == [3, 4, 5, 6, 7]


def test_unreadable_sentences_are_ignored(text: Path) -> None:
    contents = iter([b"\xff\x00\xed\xa0\x80", b"\n", b"x" * 10_000])

    def listen(event: Any) -> None:
        if isinstance(event, events.Opened):
            Path(event.run, "sentence.txt").write_bytes(next(contents))

    for is_text in (True, False, False):
        run = library.train(text, listen=listen, **{**FAST, "steps": 1}).run
        pieces = read_history(run).frames[-1].pieces
        assert (pieces[:3] == ["<0xEF>", "<0xBF>", "<0xBD>"]) == is_text


def test_indices_are_spread_with_both_ends() -> None:
    assert [film.spread(count, 4) for count in (1, 2, 4, 5, 12)] == [
        [0],
        [0, 1],
        [0, 1, 2, 3],
        [0, 1, 3, 4],
        [0, 4, 7, 11],
    ]
