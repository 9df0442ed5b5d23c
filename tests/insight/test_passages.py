"""The passages of the training text that a text repeats, compared with a naive search."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Stream, make_text

from gpt.corpus.token_folder import TokenFolder
from gpt.insight import copying, passages
from gpt.insight.copying import find_copies
from gpt.insight.passages import TrainingText
from gpt.insight.report import training_tokens
from gpt.runs.record import RunRecord

LETTERS = "\n" + "".join(map(chr, range(0x4E00, 0x4E40)))  # The text of each id. Id 0 is a line break.
OPENING = 64


class Folder:
    """A token folder of documents that begin with ``opening`` special ids."""

    def __init__(self, documents: Sequence[Sequence[int]], opening: int = 1) -> None:
        self.documents = documents
        ids = np.array([id for document in documents for id in [*[OPENING] * opening, *document]], np.int64)
        offsets = np.cumsum([0, *(opening + len(document) for document in documents)])
        self.stream = lambda side: Stream(ids.tolist(), offsets)
        decode = lambda ids: "".join(LETTERS[id] for id in ids)
        self.tokenizer = SimpleNamespace(
            opening=[OPENING] * opening, vocab_size=64, decode=decode, decode_bytes=lambda ids: decode(ids).encode()
        )


def search(ids: Sequence[int], at: int, folder: Folder) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields, for each place of the id ``at``, the start of the longest span around it, and the passage. Compares all
    spans."""
    text = folder.tokenizer.decode(ids)
    for number, document in enumerate(map(folder.tokenizer.decode, folder.documents), 1):
        for hit in (i for i, letter in enumerate(document) if letter == text[at]):
            spans = ((i, j) for i in range(max(0, at - hit), at + 1) for j in range(at + 1, len(text) + 1))
            equal = ((i, j) for i, j in spans if text[i:j] == document[hit - at + i : hit - at + j])
            start, end = max(equal, key=lambda span: span[1] - span[0])
            place, stop = hit - at + start, hit - at + end
            yield start, {
                "length": end - start, "before": document[max(0, place - 60) : place], "text": text[start:end],
                "after": document[stop : stop + 60], "document": number, "line": 1 + document[:place].count("\n"),
            }  # fmt: skip


def test_trace_agrees_with_a_naive_search_on_a_thousand_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, count = random.Random(0), 0
    while count < 1000:
        ids, opening = range(generator.choice((2, 3, 9, 40))), generator.choice((1, 2))
        documents = [generator.choices(ids, k=generator.randrange(90)) for _ in range(generator.randrange(1, 6))]
        text: list[int] = []
        while len(text) < 24:  # Copied spans and others.
            document = generator.choice(documents)
            start = generator.randrange(len(document) + 1)
            text += [*document[start : start + generator.randrange(25)], *generator.choices((*ids, 60), k=2)]
        monkeypatch.setattr(copying, "IDS_PER_PASS", generator.choice((1, 7, 50, 1000)))
        folder: Any = Folder(documents, opening)
        training = TrainingText(folder)
        for at in generator.sample(range(len(text)), 5):
            first = generator.randrange(len(text))
            result = training.trace(text, at, first)
            expected = sorted(search(text, at, folder), key=lambda each: -each[1]["length"])
            longest = expected[0][1]["length"] if expected else 0
            assert (result["length"], result["start"]) == (longest, expected[0][0] if expected else at)
            assert result["count"] == sum(passage["length"] == longest for _, passage in expected)
            shown = [passage for _, passage in expected if passage["length"] >= min(8, longest)]
            assert result["passages"] == shown[:5]
            assert result["share"] == find_copies([text[first:]], folder.stream("train"))[0].share
            count += longest > 0


def test_repetitions_and_empty_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    folder: Any = Folder([[1] * 3000])
    result = TrainingText(folder).trace([1] * 2000 + [2], 1000, 0)
    assert (result["length"], result["count"], result["start"]) == (2000, 1001, 0)
    assert result["share"] == pytest.approx(1 - 1 / 1994)
    empty: Any = Folder([[]])
    result = TrainingText(empty).trace([1] * 8, 3, 1)
    assert (result["start"], result["length"], result["count"], result["passages"]) == (3, 0, 0, [])
    assert (result["share"], TrainingText(empty).trace([1] * 8, 3, 0)["share"]) == (None, 0)
    monkeypatch.setattr(passages, "MAX_IDS", 20)
    partial: Any = Folder([list(range(30)), list(range(30))])
    result = TrainingText(partial).trace([16, 17, 18, 19, 20], 1, 0)
    assert (result["compared"], result["trained"], result["length"], result["count"]) == (20, 62, 3, 1)
    assert result["passages"][0]["after"] == ""


@pytest.fixture
def tokens(run_folder: Path) -> TokenFolder:
    folder = training_tokens(run_folder, RunRecord.read(run_folder))
    assert folder is not None
    return folder


def test_trace_of_a_run_shows_text_and_line(tokens: TokenFolder) -> None:
    text, training = make_text(), TrainingText(tokens)
    for place in (0, 4000, 7000):
        ids = tokens.tokenizer.encode(text[place : place + 100]).tolist()
        result = training.trace([5, *ids, 5], len(ids) // 2, 0)
        (passage,) = result["passages"]
        around = passage["before"] + passage["text"] + passage["after"]
        assert passage["text"] in text[place : place + 100]
        assert len(passage["text"]) > 80 and text.count(around) == 1
        assert passage["document"] == 1
        assert passage["line"] == 1 + text[: text.index(around) + len(passage["before"])].count("\n")


def test_pieces_of_a_sample_are_its_copied_spans(tokens: TokenFolder) -> None:
    text, tokenizer = make_text(), tokens.tokenizer
    sample = f"{text[100:200]}zzzz zzzz zzzz zzzz{text[5000:5080]}"
    ids = tokenizer.encode(sample).tolist()
    (copied,) = find_copies([ids], tokens.stream("train"))
    pieces = TrainingText(tokens).split(ids, copied)
    assert "".join(piece["text"] for piece in pieces) == sample
    long = [piece for piece in pieces if piece.get("length", 0) > 20]
    assert len(long) == 2 and max(piece["length"] for piece in long) == copied.longest
    assert all(piece["text"] in piece["passages"][0]["text"] for piece in long)
    assert {piece["length"] for piece in pieces if "passages" in piece} == {length for _, length in copied.maximal}
    assert any("zzzz" in piece["text"] and "passages" not in piece for piece in pieces)
