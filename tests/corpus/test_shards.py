"""Token shards on disk, and streams over many shards."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt.corpus import shards
from gpt.corpus.shards import Shard, TokenStream
from gpt.system.errors import UserError


def write_shard(path: Path, ids: list[int], offsets: list[int], vocab_size: int = 400) -> str:
    return shards.write_shard(path, [np.array(ids[:2]), np.array(ids[2:])], np.array(offsets, np.uint64), vocab_size)


def test_shard_round_trip(tmp_path: Path) -> None:
    checksum = write_shard(tmp_path / "x.ids", [399, 5, 6, 399, 399, 7], [0, 3, 4])
    shard = Shard(tmp_path / "x.ids")
    assert (len(shard), shard.documents, shard.vocab_size, shard.continues) == (6, 3, 400, False)
    assert shard.take(1, 99).tolist() == [5, 6, 399, 399, 7]
    assert shard.take(0, 6).dtype == np.uint16
    assert shard.offsets().tolist() == [0, 3, 4]
    assert [p.name for p in tmp_path.iterdir()] == ["x.ids"]
    shard.verify(checksum)
    write_shard(tmp_path / "y.ids", [70_000, 1], [1], 70_001)
    assert Shard(tmp_path / "y.ids").take(0, 2).tolist() == [70_000, 1]
    assert Shard(tmp_path / "y.ids").continues
    write_shard(tmp_path / "none.ids", [], [])
    assert len(Shard(tmp_path / "none.ids")) == 0
    assert (tmp_path / "x.ids").stat().st_size == 40 + 12 + 4 + 24


def test_damaged_shard_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.ids"
    checksum = write_shard(path, [399, 5, 6, 399, 399, 7], [0, 3, 4])
    valid_data = path.read_bytes()
    header = [
        valid_data[:at] + byte + valid_data[at + 1 :]
        for at, byte in ((0, b"X"), (8, b"\x09"), (24, b"\xff"), (31, b"\xff"))
    ]
    for bad in (b"", valid_data[:20], valid_data[:-1], valid_data + b"x", *header):
        path.write_bytes(bad)
        with pytest.raises(UserError, match=r"x\.ids"):
            Shard(path)
    path.write_bytes(
        valid_data[:16] + (399).to_bytes(4, "little") + valid_data[20:]
    )  # The header now has a vocabulary of 399.
    assert Shard(path).take(1, 3).tolist() == [5, 6]
    with pytest.raises(UserError, match="contains id 399, outside its vocabulary of 399"):
        Shard(path).take(0, 6)
    path.write_bytes(valid_data[:-1] + b"\xff")
    with pytest.raises(UserError, match="offsets out of order"):
        Shard(path).offsets()
    with pytest.raises(UserError, match="its sha256 "):
        Shard(path).verify(checksum)
    with pytest.raises(UserError, match="an id outside the vocabulary of 7"):
        write_shard(tmp_path / "z.ids", [7], [0], 7)
    with pytest.raises(UserError, match="cannot read"):
        Shard(tmp_path / "missing.ids")


@settings(max_examples=60)
@given(data=st.data())
def test_token_stream_concatenates_shards(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("stream")
    documents = data.draw(st.lists(st.lists(st.integers(0, 398), max_size=6), min_size=1, max_size=8))
    ids = [id for document in documents for id in [399, *document]]
    starts = [at for at, id in enumerate(ids) if id == 399]
    borders = sorted({0, len(ids), *data.draw(st.lists(st.integers(0, len(ids)), max_size=4))})
    stream_shards = []
    for a, b in pairwise(borders):
        write_shard(folder / f"{a}.ids", ids[a:b], [start - a for start in starts if a <= start < b])
        stream_shards.append(Shard(folder / f"{a}.ids"))
    stream = TokenStream(stream_shards)
    assert len(stream) == len(ids)
    assert [document[:].tolist() for document in stream.documents] == documents
    assert stream.documents.lengths.tolist() == [len(document) for document in documents]
    start, length = data.draw(st.integers(0, len(ids) - 1)), data.draw(st.integers(1, 2 * len(ids)))
    assert stream.take(start, length).tolist() == [ids[(start + i) % len(ids)] for i in range(length)]
    a, b = sorted(data.draw(st.tuples(st.integers(0, 8), st.integers(0, 8))))
    assert [document[a:b].tolist() for document in stream.documents] == [document[a:b] for document in documents]


def test_shards_are_unmapped_after_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        write_shard(tmp_path / f"{number}.ids", [399, number] * 1000, list(range(0, 2000, 2)))
    monkeypatch.setattr(shards, "RELEASE_MAPS", 4)
    monkeypatch.setattr(shards, "RELEASE_EVERY", 2**20)
    stream_shards = [Shard(tmp_path / f"{number}.ids") for number in range(20)]
    stream = TokenStream(stream_shards)
    for step in range(200):
        assert stream.take(step * 211 % len(stream), 8).shape == (8,)
        assert sum(shard._map is not None for shard in stream_shards) <= 5
    for _ in range(20):
        stream.take(0, 1)
    assert stream._touched <= 2**20
