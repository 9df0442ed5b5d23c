"""Training and held-out text."""

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.config.text import ReadConfig
from gpt.corpus.corpus import Split, TextSample, plan_split, survey
from gpt.documents.documents import Chunk, Reader
from gpt.documents.unpack import Source
from gpt.system.errors import UserError

READING = ReadConfig()


def sources(*texts: str) -> list[Source]:
    def source(number: int, data: bytes) -> Source:
        return Source(f"{number}.txt", len(data), 0, lambda: io.BytesIO(data))

    return [source(number, text.encode()) for number, text in enumerate(texts)]


def split_texts(texts: list[str], fraction: float, seed: int = 0) -> tuple[list[str], list[str]]:
    text_sources = sources(*texts)
    rule = plan_split(text_sources, survey(text_sources, READING), READING, fraction, seed)
    sides: tuple[list[str], list[str]] = ([], [])
    for number, source in enumerate(text_sources):
        for chunk, held_out in rule.assign(Reader(READING).documents(source), number):
            if chunk.begins:
                sides[held_out].append("")
            sides[held_out][-1] += chunk.text
    return sides


@settings(max_examples=50)
@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=8), st.floats(0.01, 0.9))
def test_split_at_the_end_loses_no_text(texts: list[str], fraction: float) -> None:
    texts = [re.sub("[\0\r]", "0", text) for text in texts]
    size = sum(len(text.encode()) for text in texts)
    try:
        train, held_out = split_texts(texts, fraction)
    except UserError:  # The texts are too short to split.
        assert round(size * fraction) in (0, size)
        return
    assert "".join(train) + "".join(held_out) == "".join(texts)
    assert abs(sum(len(text.encode()) for text in held_out) - fraction * size) <= 4


def test_end_of_the_text_is_held_out() -> None:
    assert split_texts(["a" * 50, "b" * 50], 0.1) == (["a" * 50, "b" * 40], ["b" * 10])
    assert split_texts(["abc"], 0) == (["abc"], [])


def test_many_documents_are_split_by_hash() -> None:
    documents = [f"document {i}" for i in range(1000)]
    train, held_out = split_texts(documents, 0.1, 7)
    assert len(train) + len(held_out) == 1000
    assert 60 < len(held_out) < 140
    more_train, more_held_out = split_texts([*(f"new {i}" for i in range(500)), *documents], 0.1, 7)
    assert set(held_out) <= set(more_held_out)  # Added documents don't move the others.
    assert set(train) <= set(more_train)
    assert len(split_texts(documents, 1e-9, 7)[1]) == 1  # Held-out text is never empty.
    assert len(split_texts(documents, 1 - 1e-9, 7)[0]) == 1  # Training text is never empty.
    assert set(split_texts(documents, 0.1, 8)[1]) != set(held_out)


@pytest.mark.parametrize("fraction", [0.02, 0.9])
def test_identical_documents_leave_neither_side_empty(fraction: float) -> None:
    for seed in range(3):
        train, held_out = split_texts(["one"] * 150 + ["two"] * 150, fraction, seed)
        assert {*train, *held_out} == {"one", "two"}
        assert len(train) == len(held_out) == 150
    with pytest.raises(UserError, match="all documents have the same first 65,536 characters") as error:
        split_texts(["one"] * 300, fraction)
    assert "--val-text" in error.value.hint
    assert split_texts(["one"] * 300, 0) == (["one"] * 300, [])


def test_all_chunks_of_a_document_go_to_one_side() -> None:
    rule = Split("hash", 0.5, 0, bound=0.5)
    chunks = [Chunk(f"{number // 3} begins", number % 3 == 0) for number in range(150)]
    sides = [held_out for _, held_out in rule.assign(chunks, 0)]
    assert sides == [side for side in sides[::3] for _ in range(3)]
    assert len(set(sides)) == 2


def test_survey_reads_only_the_first_bytes_of_text_files() -> None:
    class FirstBytes(io.BytesIO):
        def read1(self, size: int | None = -1, /) -> bytes:
            assert size == 2**16
            return super().read1(size)

    bom, line = b"\xef\xbb\xbf", b'{"text": "some text"}\n'

    def jsonl(count: int) -> Source:
        return Source("a.jsonl", count * len(line), 0, lambda: io.BytesIO(count * line))

    text_sources = [Source(f"https://host/{n}.txt", 10, 0, lambda: 1 / 0) for n in range(2)]
    text_sources += [Source("a.txt", 10, 0, lambda: FirstBytes(bom + b"1234567"))]
    result = survey(text_sources, READING)
    assert (result.documents, result.bytes, result.sizes) == (3, 27, [10, 10, 7])
    assert survey([Source("a.txt", 3, 0, lambda: FirstBytes(bom))], READING).documents == 0
    result = survey([jsonl(50), *text_sources], READING)
    assert (result.documents, result.sizes) == (53, [450, 10, 10, 7])
    result = survey([jsonl(500), *text_sources], READING)
    assert (result.documents, result.sizes) == (200, None)
    assert result.bytes > 1000


def test_text_sample_is_evenly_spread_and_bounded() -> None:
    text = "".join(f"{number:08d}" for number in range(2**17))  # 16 chunks of 65,536 characters
    chunks = [Chunk(text[at : at + 65536], at == 0) for at in range(0, len(text), 65536)]
    sample = TextSample(iter(chunks), len(text), 8192)
    parts = list(sample)
    assert (sample.bytes_seen, sample.bytes_taken, sum(map(len, parts))) == (len(text), 8192, 8192)
    positions = [text.index(part) / len(text) for part in parts]
    assert all(abs(place - k / len(parts)) < 0.01 for k, place in enumerate(positions))
    assert len(parts) == 8
    assert "".join(TextSample(iter(chunks), len(text), 2**31)) == text
    assert "".join(TextSample(iter([Chunk("é" * 1000, True)]), 2000, 101)) == "é" * 50  # A character is never split.
