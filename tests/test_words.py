"""One of something is not several."""

from pathlib import Path

import pytest
from conftest import Gpt, make_text


def test_a_run_of_one_step(workdir: Path, gpt: Gpt) -> None:
    Path("book.txt").write_bytes(make_text(400).encode())
    shape = ["--n-layer", "1", "--n-head", "1", "--n-embd", "16", "--block-size", "16", "--tokenizer", "bytes"]
    done = gpt("train", "book.txt", "-o", "run", "--steps", "1", "--batch-tokens", "16", *shape)
    assert done.code == 0
    assert "(1 layer, 1 head, 16 wide" in done.err
    assert "\n1 step of 16 tokens, " in done.err
    assert "book.txt: 1 document; " in done.err
    assert "(1 step in " in done.out
    done = gpt("sample", "the", "-m", "run", "-n", "3", "--seed", "1", "--out", "texts.jsonl")
    assert "(1 sample)" in done.out
    assert "has 1 sample; completing it" in gpt("sample", "the", "-m", "run", "-n", "3", "--out", "texts.jsonl").err


@pytest.mark.parametrize(("tokens", "said"), [("3767e6", ": 1 day on 1 h100"), ("7534e6", ": 2 days on 1 h100")])
def test_one_day(gpt: Gpt, tokens: str, said: str) -> None:
    done = gpt("params", "gpt3-1.3b", "--devices", "1", "--time", "--tokens", tokens)
    assert said in done.out
