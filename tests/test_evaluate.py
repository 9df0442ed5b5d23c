"""Evaluation against a naive loop, token by token."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import CPU

from gpt import evaluate
from gpt.config import GPTConfig
from gpt.decoding.context import Context
from gpt.decoding.engine import generate
from gpt.errors import UserError
from gpt.model.decoder import GPT
from gpt.sample_config import SampleConfig
from gpt.text.tokenizer import bytes_tokenizer

TOKENIZER = bytes_tokenizer()


@given(st.lists(st.integers(0, 40), max_size=5), st.integers(1, 9), st.data())
def test_every_token_but_a_documents_first_counts_once(
    lengths: list[int], block_size: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, block_size))
    documents = [np.arange(length) for length in lengths]
    counted: list[tuple[int, int]] = []
    for window in evaluate.windows(documents, block_size, stride):
        assert len(window.x) == len(window.y) <= block_size
        assert np.array_equal(window.y, window.x + 1)
        assert window.start % stride == 0
        counted += [(window.document, int(y)) for y in window.y[window.skipped :]]
    assert sorted(counted) == [(d, y) for d, length in enumerate(lengths) for y in range(1, length)]


def test_exact_is_what_greedy_decoding_writes() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(20, 8, 1, 2, 16, dropout=0.5))
    torch.nn.init.normal_(model.wte.weight)  # so that it repeats no single id
    prompts = [[1, 2, 3], [4], [5, 6], [7, 8]]
    greedy = SampleConfig(greedy=True, max_tokens=4)
    ids = [[*p, *(token.id for token in generate(Context(model.eval(), CPU), p, greedy, {19}))] for p in prompts]
    ids[1][3] = (ids[1][3] + 1) % 20  # in the middle
    ids[2][-1] = (ids[2][-1] + 1) % 20
    found = [
        evaluate.Window(number, 0, np.array(row[:-1]), np.array(row[1:]), len(prompt) - 1)
        for number, (prompt, row) in enumerate(zip(prompts, ids, strict=True))
    ]
    nothing = evaluate.Window(4, 0, np.array([1]), np.array([2]), 1)
    assert [evaluate.count_exact(model, [each], CPU)[0] for each in found] == [1, 0, 0, 1]
    assert evaluate.count_exact(model.train(), [*found, nothing], CPU) == (2, 4)
    assert model.training


@pytest.mark.parametrize("stride", [None, 3, 8])
def test_loss_equals_a_naive_loop(stride: int | None) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(257, 8, 1, 2, 16, dropout=0.5))
    model.train()  # evaluation turns dropout off, and back on
    texts = ["the first document, a longer one", "two", "x", "Zürich"]
    result = evaluate.evaluate(model, TOKENIZER, encoded(*texts), CPU, stride)
    assert model.training
    model.eval()
    total, count = 0.0, 0
    for text in texts:
        ids = TOKENIZER.encode(text).tolist()
        done = 0
        for start in range(0, len(ids), stride or 8):
            window = ids[start : start + 9]
            with torch.no_grad():
                logprobs = model(torch.tensor([window[:8]])).log_softmax(-1)[0]
            for at in range(1, len(window)):
                if start + at > done:  # seen with the longest context it ever gets
                    total -= logprobs[at - 1, window[at]].item()
                    count += 1
            done = max(done, start + len(window) - 1)
    assert result.tokens == count == sum(len(text.encode()) - 1 for text in texts)
    assert result.loss == pytest.approx(total / count, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(total / count), rel=1e-4)
    assert result.bits_per_byte == pytest.approx(total / math.log(2) / result.bytes, rel=1e-5)
    assert result.word_perplexity == pytest.approx(math.exp(total / 9), rel=1e-4)
    assert (result.words, result.bytes, result.stride) == (9, sum(len(t.encode()) for t in texts), stride or 8)


def encoded(*texts: str) -> evaluate.Encoded:
    return evaluate.Encoded(TOKENIZER.encode(text).astype(np.int64) for text in texts)


def test_nothing_to_predict_and_wrong_strides() -> None:
    model = GPT(GPTConfig(257, 8, 1, 2, 16))
    with pytest.raises(UserError, match="fewer than two tokens"):
        evaluate.evaluate(model, TOKENIZER, encoded("x", "y"), CPU)
    for stride in (0, 9):
        with pytest.raises(UserError, match=f"stride is {stride}"):
            evaluate.evaluate(model, TOKENIZER, encoded("some text"), CPU, stride)


def test_windows_of_a_long_context_are_short_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "WINDOW", 8)
    torch.manual_seed(0)
    model = GPT(GPTConfig(257, 32, 1, 2, 16))
    documents = evaluate.Encoded([np.arange(100) % 257])
    by_default, asked = (evaluate.evaluate(model, TOKENIZER, documents, CPU, block_size=n) for n in (None, 32))
    assert (by_default.block_size, by_default.stride) == (8, 8)
    assert (asked.block_size, asked.stride, asked.tokens) == (32, 32, by_default.tokens)
    assert asked.loss != by_default.loss
    with pytest.raises(UserError, match="block-size is 33; it must be from 1 to the model's context, 32"):
        evaluate.evaluate(model, TOKENIZER, documents, CPU, block_size=33)


def test_batches_hold_as_many_tokens_as_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "TOKENS_AT_ONCE", 20)
    windows = [evaluate.Window(0, 0, np.arange(n), np.arange(n), 0) for n in (3, 3, 3, 10, 10, 32, 1)]
    assert [[len(each.x) for each in batch] for batch in evaluate._batches(windows)] == [
        [3, 3, 3], [10, 10], [32], [1],
    ]  # fmt: skip
