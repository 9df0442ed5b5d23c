"""Evaluation, compared with a naive loop over tokens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import CPU

from gpt.config.model import GPTConfig
from gpt.config.sample import SampleConfig
from gpt.decoding.context import Context
from gpt.decoding.engine import generate
from gpt.insight import evaluate
from gpt.model.decoder import GPT
from gpt.system.errors import UserError
from gpt.tokenizers.tokenizer import bytes_tokenizer

TOKENIZER = bytes_tokenizer()


@given(st.lists(st.integers(0, 40), max_size=5), st.integers(1, 9), st.data())
def test_every_token_except_the_first_counts_once(lengths: list[int], block_size: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, block_size))
    documents = [np.arange(length) for length in lengths]
    counted_tokens: list[tuple[int, int]] = []
    for window in evaluate.windows(documents, block_size, stride):
        assert len(window.x) == len(window.y) <= block_size
        assert np.array_equal(window.y, window.x + 1)
        assert window.start % stride == 0
        counted_tokens += [(window.document, int(y)) for y in window.y[window.skipped :]]
    assert sorted(counted_tokens) == [(d, y) for d, length in enumerate(lengths) for y in range(1, length)]


def test_count_exact_agrees_with_greedy_decoding() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(20, 8, 1, 2, 16, dropout=0.5))
    torch.nn.init.normal_(model.wte.weight)  # Large embeddings keep the model from repeating an id.
    prompts = [[1, 2, 3], [4], [5, 6], [7, 8]]
    greedy = SampleConfig(greedy=True, max_tokens=4)
    ids = [[*p, *(token.id for token in generate(Context(model.eval(), CPU), p, greedy, {19}))] for p in prompts]
    ids[1][3] = (ids[1][3] + 1) % 20  # The middle token is wrong.
    ids[2][-1] = (ids[2][-1] + 1) % 20
    example_windows = [
        evaluate.Window(number, 0, np.array(row[:-1]), np.array(row[1:]), len(prompt) - 1)
        for number, (prompt, row) in enumerate(zip(prompts, ids, strict=True))
    ]
    empty_window = evaluate.Window(4, 0, np.array([1]), np.array([2]), 1)
    assert [evaluate.count_exact(model, [window], CPU)[0] for window in example_windows] == [1, 0, 0, 1]
    assert evaluate.count_exact(model.train(), [*example_windows, empty_window], CPU) == (2, 4)
    assert model.training


@pytest.mark.parametrize("stride", [None, 3, 8])
def test_loss_equals_a_naive_loop(stride: int | None) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(257, 8, 1, 2, 16, dropout=0.5))
    model.train()  # Evaluation must disable dropout and restore it.
    texts = ["the first document, a longer one", "two", "x", "Zürich"]
    result = evaluate.evaluate(model, TOKENIZER, encoded(*texts), CPU, stride)
    assert model.training
    model.eval()
    total, count = 0.0, 0
    for text in texts:
        ids = TOKENIZER.encode(text).tolist()
        counted_until = 0
        for start in range(0, len(ids), stride or 8):
            window = ids[start : start + 9]
            with torch.no_grad():
                logprobs = model(torch.tensor([window[:8]])).log_softmax(-1)[0]
            for position in range(1, len(window)):
                if start + position > counted_until:  # A token counts once, with its longest context.
                    total -= logprobs[position - 1, window[position]].item()
                    count += 1
            counted_until = max(counted_until, start + len(window) - 1)
    assert result.tokens == count == sum(len(text.encode()) - 1 for text in texts)
    assert result.loss == pytest.approx(total / count, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(total / count), rel=1e-4)
    assert result.bits_per_byte == pytest.approx(total / math.log(2) / result.bytes, rel=1e-5)
    assert result.word_perplexity == pytest.approx(math.exp(total / 9), rel=1e-4)
    assert (result.words, result.bytes, result.stride) == (9, sum(len(t.encode()) for t in texts), stride or 8)


def encoded(*texts: str) -> evaluate.Encoded:
    return evaluate.Encoded(TOKENIZER.encode(text).astype(np.int64) for text in texts)


def test_too_few_tokens_or_a_bad_stride_is_an_error() -> None:
    model = GPT(GPTConfig(257, 8, 1, 2, 16))
    with pytest.raises(UserError, match="fewer than two tokens"):
        evaluate.evaluate(model, TOKENIZER, encoded("x", "y"), CPU)
    for stride in (0, 9):
        with pytest.raises(UserError, match=f"stride is {stride}"):
            evaluate.evaluate(model, TOKENIZER, encoded("some text"), CPU, stride)


def test_long_contexts_use_short_windows_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "WINDOW", 8)
    torch.manual_seed(0)
    model = GPT(GPTConfig(257, 32, 1, 2, 16))
    documents = evaluate.Encoded([np.arange(100) % 257])
    short, long = (evaluate.evaluate(model, TOKENIZER, documents, CPU, block_size=n) for n in (None, 32))
    assert (short.block_size, short.stride) == (8, 8)
    assert (long.block_size, long.stride, long.tokens) == (32, 32, short.tokens)
    assert long.loss != short.loss
    with pytest.raises(UserError, match="block-size is 33; it must be from 1 to the model's context, 32"):
        evaluate.evaluate(model, TOKENIZER, documents, CPU, block_size=33)


def test_batches_have_a_token_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "MAX_BATCH_TOKENS", 20)
    windows = [evaluate.Window(0, 0, np.arange(n), np.arange(n), 0) for n in (3, 3, 3, 10, 10, 32, 1)]
    assert [[len(window.x) for window in batch] for batch in evaluate._batches(windows)] == [
        [3, 3, 3], [10, 10], [32], [1],
    ]  # fmt: skip
