"""Repeated documents and passages, and held-out text that is also in the training text."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from conftest import Gpt, make_text

from gpt.config.text import TokenizeConfig
from gpt.corpus import repeats
from gpt.corpus.batches import Int64s
from gpt.corpus.repeats import Repeats, find_repeats, repeats_in
from gpt.corpus.token_folder import TokenFolder
from gpt.corpus.tokenize import tokenize_texts

WINDOW = 50


class Documents:
    """A stream of byte documents. Id 256 opens each."""

    def __init__(self, documents: Sequence[bytes]) -> None:
        self.ids = np.array([id for document in documents for id in (256, *document)], np.int64)
        self.offsets = np.cumsum([0, *(len(document) + 1 for document in documents)])

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, start: int, length: int) -> Int64s:
        assert start + length <= len(self.ids)
        return self.ids[start : start + length].copy()


def find(train: Sequence[bytes], held_out: Sequence[bytes] = ()) -> Repeats:
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
    found = find(train, held_out)
    documents = [*train, *held_out]
    seen: dict[bytes, int] = {}
    originals = []
    for number, document in enumerate(documents):
        shares = [window in seen for window in windows(document)]
        is_near = len(shares) >= repeats.COPY_WINDOWS and sum(shares) >= repeats.COPY_SHARE * len(shares)
        originals.append(documents.index(document) if document in documents[:number] else None if is_near else number)
        for window in windows(document):
            seen.setdefault(window, number)
    is_copy = [original != number for number, original in enumerate(originals)]
    assert found.copies.tolist() == np.flatnonzero(is_copy).tolist()
    assert all(b in (None, a) for a, b in zip(found.originals.tolist(), originals, strict=True))
    lengths = np.array(list(map(len, documents)))
    assert found.copied_share == lengths[is_copy].sum() / lengths.sum()
    earlier: set[bytes] = set()
    repeated = total = 0
    for number, document in enumerate(train):
        for window in windows(document):
            repeated, total = repeated + (window in earlier and not is_copy[number]), total + 1
            earlier.add(window)
    assert found.repeated_share == repeated / total
    is_trained = [window in earlier for document in held_out for window in windows(document)]
    assert found.held_out_share == sum(is_trained) / len(is_trained)
    assert 0 < found.held_out_share < 1 and 0 < found.repeated_share < 1
    joined = Documents(train)
    for stream, pairs in ((joined, found.repeated), (Documents(held_out), found.held_out)):
        for start, first in pairs.tolist():
            assert np.array_equal(stream.take(start, WINDOW), joined.take(first, WINDOW))


def test_a_sample_estimates_the_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    train, held_out = mixture(3, 2000, SHARED), mixture(4, 500, SHARED)
    exact = find(train, held_out)
    monkeypatch.setattr(repeats, "SAMPLED_IDS", 2**15)
    sampled = find(train, held_out)
    assert len(sampled.held_out) < len(exact.held_out) / 8
    assert abs(sampled.held_out_share - exact.held_out_share) < 0.1
    assert abs(sampled.repeated_share - exact.repeated_share) < 0.1
    assert abs(len(sampled.copies) - len(exact.copies)) < 0.1 * len(exact.copies)


@pytest.mark.parametrize(
    ("documents", "copies"),
    [
        ([], 0),
        ([b""], 0),
        ([b"x"] * 5, 4),
        ([b"\0" * n for n in range(1, 60)], 3),  # The last three have eight windows or more.
        ([b"a" * 100_000], 0),
        ([b"a" * 100_000] * 2, 1),
        ([bytes(range(256)) * 3], 0),
    ],
)
def test_unusual_texts(documents: Sequence[bytes], copies: int) -> None:
    assert len(find(documents).copies) == copies


def test_uniform_text_needs_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "SAMPLED_IDS", 2**10)
    for byte in range(0, 256, 4):  # At a rate of 1/64, a few of these windows are sampled.
        sample = repeats.take_sample(Documents([bytes([byte]) * 4 * repeats.BLOCK]), 1, WINDOW, 6)
        assert len(sample.hashes) in (0, 4, 5)


def note_lines(texts: Sequence[str], out: str, **settings: str | float) -> list[str]:
    lines: list[str] = []
    config = TokenizeConfig(tokenizer="bytes", out=out, **settings)  # type: ignore[arg-type]
    tokenize_texts(texts, config, lambda event: lines.append(getattr(event, "text", "")))
    return [line for line in lines if "gpt data check" in line]


def test_ordinary_text_has_no_note(workdir: Path) -> None:
    Path("a.txt").write_text(make_text(20_000), encoding="utf-8")
    assert note_lines(["a.txt"], "tokens") == []


def test_notes_name_the_command(workdir: Path) -> None:
    text = make_text(3000)
    for name in ("a", "b", "c"):
        Path(f"{name}.txt").write_text(text, encoding="utf-8")
    Path("d.txt").write_text("".join(text[start : start + 200] + make_text(20, start) for start in range(200)))
    lines = note_lines(["a.txt", "b.txt", "c.txt", "d.txt"], "my tokens", val_fraction=0.05)
    assert [line.partition(" of ")[2].partition("%")[0].split()[0] for line in lines] == ["5", "the", "the"]
    assert all(line.endswith(": see gpt data check 'my tokens'") for line in lines)
    assert note_lines(["a.txt", "b.txt", "c.txt", "d.txt"], "other", val_fraction=0.05, jobs=1)[0].startswith("2 of 5")


def test_check_lists_copies_by_file_and_passages_by_text(gpt: Gpt, workdir: Path) -> None:
    passage = make_text(60, 99)
    Path("texts").mkdir()
    for number in range(250):
        text = make_text(200, number) + (passage if number % 10 == 0 else "")
        Path(f"texts/{number:03}.txt").write_text(text, encoding="utf-8")
    Path("texts/500.txt").write_bytes(Path("texts/100.txt").read_bytes())
    assert note_lines(["texts"], "tokens") == []
    done = gpt("data", "check", "tokens", "--json")
    found = json.loads(done.out)
    assert (found["documents"], found["copies"]) == (251, 1)
    (copy,) = found["repeated_documents"]
    assert [copy[key]["file"] for key in ("copy", "original")] == ["texts/500.txt", "texts/100.txt"]
    assert found["repeated_passages"][0]["text"].strip()[:100] in passage
    assert found["repeated_passages"][0]["repeats"] >= 15
    assert found["held_out_passages"][0]["places"][0]["side"] == "val"
    shown = gpt("data", "check", "tokens")
    assert shown.out.startswith("copies  1 of 251 documents")
    assert "texts/500.txt" in shown.out


def test_files_of_a_split_at_the_end(workdir: Path) -> None:
    for name, seed in (("a", 1), ("b", 2), ("c", 1), ("d", 3)):
        Path(f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": make_text(40, 10 * seed + i)}) + "\n" for i in (1, 2))
        )
    note_lines(["a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl"], "tokens")
    copies = list(repeats.Listing(TokenFolder("tokens")).copies())
    assert [(c["copy"]["file"], c["original"]["file"]) for c in copies] == [("c.jsonl", "a.jsonl")] * 2


MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("record", [{"prompt": "a", "completion": "b"}, {"messages": MESSAGES}])
def test_check_lists_repeated_examples(gpt: Gpt, workdir: Path, record: dict[str, object]) -> None:
    other = json.loads(json.dumps(record).replace('"a"', '"c"'))
    Path("x.jsonl").write_text("".join(json.dumps(value) + "\n" for value in (record, other, record)))
    found = json.loads(gpt("data", "check", "x.jsonl", "--json").out)
    assert (found["documents"], found["copies"]) == (3, 1)
    assert found["repeated_documents"][0]["copy"].startswith("x.jsonl")
    assert gpt("data", "check", "x.jsonl").out.startswith("copies  1 of 3 examples")


def test_check_finds_the_data_of_a_run(gpt: Gpt, run_folder: Path, workdir: Path) -> None:
    assert gpt("data", "check", run_folder).out.startswith("copies  0 of 2 documents")
    Path("x.txt").write_text(make_text(500), encoding="utf-8")
    note_lines(["x.txt"], "tokens")
    (run := Path("run")).mkdir()
    (run / "run.json").write_text(json.dumps({"format": 1, "texts": ["tokens"]}))
    assert gpt("data", "check", run).out == gpt("data", "check", "tokens").out != ""


def test_check_needs_tokens_or_examples(gpt: Gpt, workdir: Path) -> None:
    Path("book.txt").write_text("x")
    done = gpt("data", "check", "book.txt")
    assert done.code == 2
    assert "gpt tokenize TEXT -o DIR" in done.err


def test_the_tokens_decide_whatever_the_shards_are(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.txt").write_text(make_text(3000) * 2, encoding="utf-8")
    note_lines(["a.txt"], "one")
    monkeypatch.setattr("gpt.corpus.unfinished_folder.SHARD_IDS", 2**12)
    monkeypatch.setattr("gpt.corpus.tokenize.BATCH", 2**10)
    monkeypatch.setattr("gpt.corpus.corpus.ENCODE_CHARACTERS", 2**10)
    note_lines(["a.txt"], "many")
    first, second = (repeats_in(TokenFolder(name)) for name in ("one", "many"))
    assert len(TokenFolder("many").shards) > len(TokenFolder("one").shards)
    assert first.repeated.tolist() == second.repeated.tolist()
    assert first.notes("c") == second.notes("c")
