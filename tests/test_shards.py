"""Ids on disk."""

from pathlib import Path

import numpy as np
import pytest
from conftest import make_text

from gpt.errors import UserError
from gpt.text import shards, tokenizer


@pytest.fixture(scope="module")
def learnt() -> tokenizer.Tokenizer:
    return tokenizer.learn_tokenizer([make_text()], 400)


def test_shards_read_back(tmp_path: Path, learnt: tokenizer.Tokenizer) -> None:
    texts = ["one", "", "three 🐕"]
    shard = shards.encode_documents(learnt, texts)
    shards.write(tmp_path / "x.ids", shard, learnt.vocab_size)
    again, vocab_size = shards.read(tmp_path / "x.ids")
    assert vocab_size == 400
    assert again.ids.dtype == np.uint16
    assert [learnt.decode(ids.tolist()) for ids in again.documents()] == texts
    assert again.ids[again.offsets.astype(int)].tolist() == [learnt.eot] * 3
    assert [p.name for p in tmp_path.iterdir()] == ["x.ids"]
    shards.write(tmp_path / "none.ids", shards.encode_documents(learnt, []), 400)
    assert len(shards.read(tmp_path / "none.ids")[0].ids) == 0


def test_damaged_shards_are_refused(tmp_path: Path, learnt: tokenizer.Tokenizer) -> None:
    path = tmp_path / "x.ids"
    shards.write(path, shards.encode_documents(learnt, ["some text", "more"]), learnt.vocab_size)
    good = path.read_bytes()
    for bad in (
        b"",
        good[:20],
        good[:-1],
        good + b"x",
        b"X" + good[1:],
        good[:8] + b"\x09" + good[9:],
        good[:32] + b"\xff" + good[33:],
    ):
        path.write_bytes(bad)
        with pytest.raises(UserError, match=r"x\.ids"):
            shards.read(path)
    shards.write(path, shards.encode_documents(learnt, ["some text"]), 300)  # a vocabulary smaller than its ids
    with pytest.raises(UserError, match="outside its vocabulary of 300"):
        shards.read(path)
