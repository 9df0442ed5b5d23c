"""Copies of documents, and held-out text that is also in the training text."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from conftest import make_text

from gpt.config.text import TokenizeConfig
from gpt.corpus import repeats
from gpt.corpus.batches import Int64s
from gpt.corpus.repeats import find_repeats
from gpt.corpus.tokenize import tokenize_texts

WINDOW = 50


class Documents:
    """A stream of byte documents. Id 256 opens each."""

    def __init__(self, documents: Sequence[bytes]) -> None:
        parts = [part for document in documents for part in ([256], np.frombuffer(document, np.uint8))]
        self.ids = np.concatenate([np.zeros(0, np.int64), *parts])
        self.offsets = np.cumsum([0, *(len(document) + 1 for document in documents)])

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, start: int, length: int) -> Int64s:
        assert start + length <= len(self.ids)
        return self.ids[start : start + length].copy()


def find(train: Sequence[bytes], held_out: Sequence[bytes] = ()) -> tuple[int, float, float]:
    return find_repeats(Documents(train), Documents(held_out), 1, WINDOW)


def windows(document: bytes) -> list[bytes]:
    return [document[i : i + WINDOW] for i in range(len(document) - WINDOW + 1)]


def mixture(seed: int, count: int, shared: Sequence[bytes]) -> list[bytes]:
    """Documents of random text, with shared passages and a few copies."""
    rng = random.Random(seed)
    documents: list[bytes] = []
    for _ in range(count):
        parts = [rng.choice(shared) if rng.random() < 0.2 else rng.randbytes(rng.randrange(120)) for _ in range(6)]
        documents.append(rng.choice(documents) if documents and rng.random() < 0.1 else b"".join(parts))
    return documents


SHARED = [random.Random(seed).randbytes(40 + 30 * seed) for seed in range(6)]


@pytest.mark.parametrize("block", [64, 1000, repeats.BLOCK])
def test_every_window_of_a_short_text_is_compared(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "BLOCK", block)
    train, held_out = mixture(1, 150, SHARED), mixture(2, 40, SHARED)
    documents = [*train, *held_out]
    copies = [document for number, document in enumerate(documents) if document in documents[:number]]
    trained = {window for document in train for window in windows(document)}
    is_trained = [window in trained for document in held_out for window in windows(document)]
    copied = sum(map(len, copies)) / sum(map(len, documents))
    assert find(train, held_out) == (len(copies), copied, sum(is_trained) / len(is_trained))
    assert 0 < sum(is_trained) < len(is_trained)


def test_a_sample_estimates_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    train, held_out = mixture(3, 2000, SHARED), mixture(4, 500, SHARED)
    exact = find(train, held_out)
    monkeypatch.setattr(repeats, "SAMPLED_IDS", 2**15)
    sampled = find(train, held_out)
    assert sampled[:2] == exact[:2] and sampled[2] != exact[2]
    assert abs(sampled[2] - exact[2]) < 0.1


@pytest.mark.parametrize(
    ("documents", "copies"),
    [
        ([], 0),
        ([b""], 0),
        ([b"x"] * 5, 4),
        ([b"\0" * n for n in range(1, 60)], 0),
        ([b"a" * 100_000], 0),
        ([b"a" * 100_000] * 2, 1),
        ([bytes(range(256)) * 3], 0),
    ],
)
def test_unusual_texts(documents: Sequence[bytes], copies: int) -> None:
    assert find(documents)[0] == copies


def test_uniform_text_needs_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "SAMPLED_IDS", 2**10)
    for byte in range(0, 256, 4):  # At a rate of 1/64, a few of these windows are sampled.
        sample = repeats.take_sample(Documents([bytes([byte]) * 4 * repeats.BLOCK]), 1, WINDOW, 6)
        assert len(sample.hashes) in (0, 4, 5)


def note_lines(texts: Sequence[str], out: str, **settings: str | float) -> list[str]:
    lines: list[str] = []
    config = TokenizeConfig(tokenizer="bytes", out=out, **settings)  # type: ignore[arg-type]
    tokenize_texts(texts, config, lambda event: lines.append(getattr(event, "text", "")))
    return [line for line in lines if "earlier one" in line or "training text" in line]


def test_ordinary_text_has_no_note(workdir: Path) -> None:
    Path("a.txt").write_text(make_text(20_000), encoding="utf-8")
    assert note_lines(["a.txt"], "tokens") == []


def test_notes_have_the_shares(workdir: Path) -> None:
    text = make_text(3000)
    for name in ("a", "b", "c"):
        Path(f"{name}.txt").write_text(text, encoding="utf-8")
    Path("d.txt").write_text(make_text(3000, 1) + text[:400])
    lines = note_lines(["a.txt", "b.txt", "c.txt", "d.txt"], "tokens", val_fraction=0.05)
    assert lines[0].startswith("2 documents copy earlier ones (50% of the text)"), lines
    assert lines[1].endswith("% of the held-out text is also in the training text, which lowers the held-out loss"), (
        lines
    )
    assert note_lines(["a.txt", "b.txt", "c.txt", "d.txt"], "other", val_fraction=0.05, jobs=1) == lines
